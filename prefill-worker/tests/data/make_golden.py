"""Makes tiny random llamas and what mlx-lm's own forward puts into its caches for them.

    pip install mlx-lm==0.32.2 mlx==0.32.2 mlx-cpu==0.32.2
    python make_golden.py

Writes NAME.safetensors for each case below: the weights under their Hugging Face names, `tokens`, `inv_freq`, and for
every layer `golden.{layer}.k`, `golden.{layer}.v` `[n_kv_heads, tokens, head_dim]` and `golden.{layer}.attn_input`
`[tokens, hidden]`. The configuration and the versions used are in the file's metadata.
"""

import json
from importlib.metadata import version

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

BASE = dict(model_type="llama", hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=48, vocab_size=64, rms_norm_eps=1e-5, max_position_embeddings=512, rope_theta=10000.0,
            tie_word_embeddings=True)
CASES = {
    "tiny_plain": dict(BASE),
    "tiny_biased_llama3": dict(BASE, num_attention_heads=6, num_key_value_heads=2, head_dim=16, attention_bias=True,
                               mlp_bias=True, rope_theta=500000.0,
                               rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                                                 high_freq_factor=4.0, original_max_position_embeddings=64)),
}
TOKENS = 83


def main():
    mx.random.seed(20261130)
    for name, config in CASES.items():
        model = llama.Model(llama.ModelArgs.from_dict(config))
        model.update(tree_map(lambda p: mx.random.normal(p.shape) * 0.3 + (1.0 if p.ndim == 1 and p.size == 32 else 0.0),
                              model.parameters()))
        tokens = mx.random.randint(0, config["vocab_size"], (TOKENS,)).astype(mx.uint32)
        weights = dict(tree_flatten(model.parameters()))
        inputs = []
        for layer in model.model.layers:
            norm = layer.input_layernorm
            layer.input_layernorm = lambda x, norm=norm: (inputs.append(norm(x)), inputs[-1])[1]
        cache = make_prompt_cache(model)
        mx.eval(model(tokens[None], cache=cache))
        head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        rope = model.model.layers[0].self_attn.rope
        if getattr(rope, "_freqs", None) is not None:
            inv_freq = 1.0 / rope._freqs
        else:
            half = head_dim // 2
            inv_freq = mx.exp(mx.arange(0, -half, -1).astype(mx.float32) * (mx.log(mx.array(config["rope_theta"])) / half))
        out = dict(weights)
        for i, (c, x) in enumerate(zip(cache, inputs)):
            k, v = c.state[0], c.state[1]
            out[f"golden.{i}.k"] = k[0, :, :TOKENS]
            out[f"golden.{i}.v"] = v[0, :, :TOKENS]
            out[f"golden.{i}.attn_input"] = x[0]
        out["tokens"] = tokens
        out["inv_freq"] = inv_freq
        versions = {p: version(p) for p in ("mlx", "mlx-lm")}
        metadata = {"config": json.dumps(config), "versions": json.dumps(versions), "command": "python make_golden.py"}
        mx.save_safetensors(f"{name}.safetensors", out, metadata)
        print(name, versions, {k: v.shape for k, v in out.items() if k.startswith("golden.0")})


if __name__ == "__main__":
    main()
