"""Rust declarations of mlx-c's headers, as mlx-sys' build script would have bindgen write them.

usage: PYTHONPATH=<wheel pycparser> bindings.py MLX_C_SOURCES > bindings.rs

mlx-c's interface is small and regular (handles, enums, functions, callbacks), so a C parser and the tables below do,
and neither libclang nor bindgen has to be fetched and built. Anything outside that is an error, not a guess.
"""
import pathlib
import subprocess
import sys
import tempfile

from pycparser import c_ast, c_parser

# System headers are not read: these are all the names mlx-c takes from them. mlx-rs wants f16 as a wrapped u16.
SYSTEM_TYPES = {
    "bool": "bool", "size_t": "usize", "uintptr_t": "usize", "FILE": "FILE",
    "float16_t": "float16_t", "bfloat16_t": "bfloat16_t",
    **{f"{sign}int{bits}_t": f"{rust}{bits}" for bits in (8, 16, 32, 64) for sign, rust in (("u", "u"), ("", "i"))},
}
C_TYPES = {
    "void": "::std::os::raw::c_void", "char": "::std::os::raw::c_char", "int": "::std::os::raw::c_int",
    "unsigned int": "::std::os::raw::c_uint", "float": "f32", "double": "f64",
    "float _Complex": "__BindgenComplex<f32>", "_Bool": "bool",
}
PRELUDE = """
#[repr(transparent)]
#[derive(Debug, Default, Copy, Clone)]
pub struct float16_t(pub u16);
pub type bfloat16_t = u16;
#[repr(C)]
#[derive(PartialEq, Copy, Clone, Hash, Debug, Default)]
pub struct __BindgenComplex<T> {
    pub re: T,
    pub im: T,
}
#[repr(C)]
pub struct FILE {
    _opaque: [u8; 0],
}
"""
RUST_KEYWORDS = {"as", "fn", "in", "loop", "match", "mod", "move", "ref", "self", "type", "use", "where"}


def preprocessed(sources):
    headers = sorted((sources / "mlx/c").glob("*.h"))
    with tempfile.TemporaryDirectory() as empty:
        for line in "".join(h.read_text() for h in headers).splitlines():
            if line.startswith("#include <"):
                pathlib.Path(empty, line.split("<")[1].split(">")[0]).touch()
        text = "".join(f'#include "{h}"\n' for h in headers)
        command = ["g++", "-E", "-P", "-nostdinc", f"-I{empty}", f"-I{sources}", "-U__aarch64__",
                   "-DHAS_FLOAT16", "-DHAS_BFLOAT16", "-x", "c", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"bindings.py: {done.stderr}")
    return "".join(f"typedef int {name};\n" for name in SYSTEM_TYPES) + done.stdout


def rust_type(node):
    """The Rust type of a C declaration without its name."""
    if isinstance(node, c_ast.TypeDecl):
        if isinstance(node.type, c_ast.IdentifierType):
            name = " ".join(node.type.names)
            return SYSTEM_TYPES.get(name) or C_TYPES.get(name) or name
        return node.type.name
    if isinstance(node, c_ast.PtrDecl):
        if isinstance(node.type, c_ast.FuncDecl):
            return f'::std::option::Option<unsafe extern "C" fn{signature(node.type)}>'
        const = "const" in (node.type.quals or [])
        return f"*{'const' if const else 'mut'} {rust_type(node.type)}"
    if isinstance(node, c_ast.ArrayDecl):  # as a parameter
        const = "const" in (node.type.quals or [])
        return f"*{'const' if const else 'mut'} {rust_type(node.type)}"
    sys.exit(f"bindings.py: cannot translate {type(node).__name__} at {node.coord}")


def signature(function):
    parameters = []
    for i, p in enumerate(function.args.params if function.args else []):
        if isinstance(p, c_ast.EllipsisParam):
            parameters.append("...")
            continue
        if isinstance(p.type, c_ast.TypeDecl) and rust_type(p.type) == C_TYPES["void"]:
            continue
        name = p.name or f"arg{i + 1}"
        parameters.append(f"{name}_: {rust_type(p.type)}" if name in RUST_KEYWORDS else f"{name}: {rust_type(p.type)}")
    result = rust_type(function.type)
    return f"({', '.join(parameters)})" + ("" if result == C_TYPES["void"] else f" -> {result}")


def structure(node):
    fields = "".join(f"    pub {d.name}: {rust_type(d.type)},\n" for d in node.decls)
    return f"#[repr(C)]\n#[derive(Debug, Copy, Clone)]\npub struct {node.name} {{\n{fields}}}\n"


def enumeration(node):
    out, value = f"pub type {node.name} = ::std::os::raw::c_uint;\n", 0
    for item in node.values.enumerators:
        if item.value is not None:
            value = int(item.value.value, 0)
        out += f"pub const {node.name}_{item.name}: {node.name} = {value};\n"
        value += 1
    return out


def declarations(node):
    """The Rust items of one C declaration."""
    if isinstance(node, c_ast.Typedef):
        if node.name in SYSTEM_TYPES:
            return
        inner = getattr(node.type, "type", None)
        if isinstance(inner, c_ast.Enum):
            yield enumeration(inner)
            yield f"pub use self::{inner.name} as {node.name};\n"
            return
        if isinstance(inner, c_ast.Struct) and inner.decls:
            yield structure(inner)
        yield f"pub type {node.name} = {rust_type(node.type)};\n"
    elif isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.FuncDecl):
        yield f'extern "C" {{\n    pub fn {node.name}{signature(node.type)};\n}}\n'
    elif isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.Struct) and node.type.decls:
        yield structure(node.type)
    elif not (isinstance(node, c_ast.Decl) and "static" in node.storage):  # those are constants, not symbols
        sys.exit(f"bindings.py: cannot translate {node.name} at {node.coord}")


written = set()
sys.stdout.write(PRELUDE)
for declared in c_parser.CParser().parse(preprocessed(pathlib.Path(sys.argv[1]))).ext:
    for item in declarations(declared):
        if item not in written:  # C may declare twice, Rust may not
            written.add(item)
            sys.stdout.write(item)
