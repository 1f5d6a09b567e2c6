"""Golden tokens for smollm2.rs: SmolLM2-135M-Instruct, its 4-bit GGUF expanded to f32, run greedily by mlx-lm.

    pip install mlx==0.32.2 mlx-cpu==0.32.2 mlx-lm==0.32.2
    python smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf > smollm2.json
"""
import json
import sys

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models import llama

tensors, meta = mx.load(sys.argv[1], return_metadata=True)
LAYERS, HEADS, KV_HEADS = (meta[f"llama.{k}"].item() for k in
                           ("block_count", "attention.head_count", "attention.head_count_kv"))
NAMES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def expanded(name):
    weight = tensors[f"{name}.weight"]
    if f"{name}.scales" not in tensors:
        return weight.astype(mx.float32)
    scales, biases = (tensors[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    bits = weight.shape[1] // scales.shape[1]  # groups of 32: one word per bit
    return mx.dequantize(weight, scales, biases, 32, bits)


def half_split(weight, heads):  # GGUF interleaves the rotary pairs of llama's queries and keys
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


weights = {"model.embed_tokens.weight": expanded("token_embd"), "model.norm.weight": expanded("output_norm")}
for layer in range(LAYERS):
    for gguf, name in NAMES.items():
        weight = expanded(f"blk.{layer}.{gguf}")
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(gguf)
        weights[f"model.layers.{layer}.{name}.weight"] = half_split(weight, heads) if heads else weight

model = llama.Model(llama.ModelArgs(
    model_type="llama", hidden_size=576, num_hidden_layers=LAYERS, intermediate_size=1536, num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"].item(),
    vocab_size=49152, rope_theta=meta["llama.rope.freq_base"].item()))
model.load_weights(list(weights.items()))

CHAT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
        198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
NOISE = [(7 * i * i + 3 * i + 11) % 40000 for i in range(300)]
cases = [{"prompt": prompt, "tokens": [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=32)]}
         for prompt in (CHAT, NOISE)]
print(json.dumps(cases))
