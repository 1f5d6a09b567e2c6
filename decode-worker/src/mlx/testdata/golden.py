"""Golden numbers for golden.rs: tiny random llamas run by mlx-lm on its CPU backend.

    pip install mlx==0.32.2 mlx-cpu==0.32.2 mlx-lm==0.32.2
    python golden.py > golden.json
"""
import json

import mlx.core as mx
from mlx_lm.models import cache, llama

BASE = dict(model_type="llama", hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=4,
            rms_norm_eps=1e-5, vocab_size=97, max_position_embeddings=1024)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
CASES = {
    "plain": dict(num_key_value_heads=2, head_dim=8, rope_theta=10000.0, tie_word_embeddings=True),
    "biased": dict(num_key_value_heads=4, head_dim=16, rope_theta=100000.0, tie_word_embeddings=False,
                   attention_bias=True, mlp_bias=True, rope_scaling={"rope_type": "linear", "factor": 3.0}),
    "llama3": dict(num_key_value_heads=1, head_dim=16, rope_theta=500000.0, tie_word_embeddings=False,
                   rope_scaling=LLAMA3),
}
PROMPT = [(7 * i * i + 3 * i + 11) % 97 for i in range(300)]


def numbers(name, n):
    """The same numbers as `numbers` in golden.rs."""
    x = 2166136261
    for byte in name.encode():
        x = (x ^ byte) * 16777619 % 2**32
    out = []
    for _ in range(n):
        x = (x * 1664525 + 1013904223) % 2**32
        out.append((x >> 8) / 2**24 - 0.5)
    return out


def weight(name, shape):
    n = 1
    for side in shape:
        n *= side
    offset = 1.0 if name.endswith("norm.weight") else 0.0
    return mx.array([offset + x for x in numbers(name, n)], dtype=mx.float32).reshape(shape)


def run(overrides):
    model = llama.Model(llama.ModelArgs.from_dict(BASE | overrides))
    from mlx.utils import tree_flatten
    shapes = {k: v.shape for k, v in tree_flatten(model.parameters())}
    model.load_weights([(k, weight(k, s)) for k, s in shapes.items()])
    kv = cache.make_prompt_cache(model)
    model(mx.array([PROMPT[:200]]), cache=kv)
    model(mx.array([PROMPT[200:-1]]), cache=kv)
    logits = model(mx.array([PROMPT[-1:]]), cache=kv)[0, -1]
    first, tokens = logits.tolist(), []
    for _ in range(24):
        tokens.append(int(mx.argmax(logits)))
        logits = model(mx.array([tokens[-1:]]), cache=kv)[0, -1]
    key = kv[1].keys[0, -1, 250].tolist()
    return {"config": BASE | overrides, "tensors": {k: list(s) for k, s in shapes.items()},
            "logits": first, "tokens": tokens, "key_layer1_last_head_token250": key}


print(json.dumps({"prompt": PROMPT, "cases": {k: run(v) for k, v in CASES.items()}}))
