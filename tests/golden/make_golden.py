"""Records what mlx-lm makes of a model, for the end-to-end tests to compare with.

usage: make_golden.py MODEL.gguf OUT.json

    python3 -m venv venv && venv/bin/pip install -r requirements.txt
    LD_PRELOAD=libopenblas.so.0 venv/bin/python make_golden.py SmolLM2-135M-Instruct.Q4_1.gguf golden.json

The weights are dequantized to float32 first (w = scale * q + bias, each operation rounded to float32), so that the
comparison is about the forward pass and not about quantized kernels. OpenBLAS only makes it faster. The tokenizer is
built from the vocabulary in the file and the splitting rules of the model's published `tokenizer.json` (single digits,
then GPT-2's byte-level rule); the chat template is rendered by `transformers`.

Per prompt: token ids, 48 greedy tokens (not stopped at the end token), the gap between the best and the second-best
logit at each step. For some prompts also statistics of every cache array over the first T - 1 positions.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prompts import PROMPTS

NEW_TOKENS = 48
CACHE_STATS_FOR = {"raw_ten_tokens", "capital", "chinese", "exactly_257"}
NAMES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def main(gguf, out):
    arrays, meta = mx.load(gguf, return_metadata=True)
    tokenizer = make_tokenizer(meta)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), arrays, meta)
        model, _ = load_model(Path(folder))
    prompts = []
    for prompt in PROMPTS:
        started = time.time()
        prompts.append(record(model, tokenizer, prompt))
        p = prompts[-1]
        print(f"{p['name']:18} {len(p['prompt_ids']):5} tokens  min gap {min(p['gaps']):.4f}  "
              f"{time.time() - started:.1f} s  {p['text_out'][:60]!r}", flush=True)
    Path(out).write_text(json.dumps({"made_by": provenance(gguf), "new_tokens": NEW_TOKENS, "prompts": prompts},
                                    ensure_ascii=False, separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n")


def record(model, tokenizer, prompt):
    ids = encode(tokenizer, prompt)
    entry = {"name": prompt["name"]}
    if "messages" in prompt:
        entry["messages"] = prompt["messages"]
    else:
        entry["text"] = tokenizer.decode(ids)
        assert tokenizer.encode(entry["text"], add_special_tokens=False) == ids, prompt["name"]
    cache = make_prompt_cache(model)
    new_ids, gaps = [], []
    for token, logprobs in generate_step(mx.array(ids), model, max_tokens=NEW_TOKENS, prompt_cache=cache):
        top = np.sort(np.array(logprobs.astype(mx.float32)))[-2:]
        new_ids.append(int(token))
        gaps.append(round(float(top[1] - top[0]), 5))
    entry |= {"prompt_ids": ids, "new_ids": new_ids, "gaps": gaps, "text_out": tokenizer.decode(new_ids)}
    if prompt["name"] in CACHE_STATS_FOR:
        entry["cache"] = [[statistics(part, len(ids) - 1) for part in (layer.keys, layer.values)] for layer in cache]
    return entry


def encode(tokenizer, prompt):
    if "messages" in prompt:
        text = tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, tokenize=False)
        return tokenizer.encode(text, add_special_tokens=False)
    ids = tokenizer.encode(prompt["text"], add_special_tokens=False)
    wanted = prompt.get("tokens")
    assert wanted is None or len(ids) >= wanted, prompt["name"]
    return ids[:wanted]


def statistics(array, rows):
    """Mean, root mean square, and a few elements: of [1, heads, tokens, dim], positions below `rows`."""
    a = np.array(array.astype(mx.float32))[0, :, :rows].astype(np.float64)
    picks = [(h, t, d) for h in (0, a.shape[0] - 1) for t in sorted({0, rows // 2, rows - 1}) for d in (0, a.shape[2] // 2 + 1)]
    return {"mean": sig(a.mean()), "rms": sig(np.sqrt((a * a).mean())),
            "samples": [[h, t, d, sig(a[h, t, d])] for h, t, d in picks]}


def sig(x):
    return float(f"{x:.8g}")


def write_model(folder, arrays, meta):
    value = lambda key: meta[key].item()
    heads, kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    out = {}
    for key in arrays:
        stem, _, kind = key.rpartition(".")
        if kind != "weight":
            continue
        w = dense(arrays, stem)
        piece = stem.split(".")
        if piece[0] == "blk":
            if piece[2] == "attn_q":
                w = unpermute(w, heads)
            if piece[2] == "attn_k":
                w = unpermute(w, kv_heads)
            name = f"model.layers.{piece[1]}.{NAMES[piece[2]]}"
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}[stem]
        out[f"{name}.weight"] = mx.array(w)
    config = {"model_type": "llama", "hidden_size": value("llama.embedding_length"),
              "num_hidden_layers": value("llama.block_count"), "intermediate_size": value("llama.feed_forward_length"),
              "num_attention_heads": heads, "num_key_value_heads": kv_heads,
              "rms_norm_eps": value("llama.attention.layer_norm_rms_epsilon"), "vocab_size": value("llama.vocab_size"),
              "rope_theta": value("llama.rope.freq_base"), "max_position_embeddings": value("llama.context_length"),
              "tie_word_embeddings": "lm_head.weight" not in out}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), out, metadata={"format": "mlx"})


def dense(arrays, stem):
    weight = np.array(arrays[f"{stem}.weight"])
    if f"{stem}.scales" not in arrays:
        return weight.astype(np.float32)
    scales, biases = (np.array(arrays[f"{stem}.{k}"]).astype(np.float32) for k in ("scales", "biases"))
    bits = weight.shape[1] * 32 // (scales.shape[1] * 32)  # groups of 32
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    q = ((weight[:, :, None] >> shifts) & np.uint32(2**bits - 1)).astype(np.float32)
    q = q.reshape(weight.shape[0], scales.shape[1], 32)
    return (scales[:, :, None] * q + biases[:, :, None]).reshape(weight.shape[0], -1)


def unpermute(w, heads):
    """GGUF stores llama's q and k rows interleaved; everyone else has the two halves of a head apart."""
    return w.reshape(heads, w.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)


def make_tokenizer(meta):
    tokens = meta["tokenizer.ggml.tokens"]
    types = np.array(meta["tokenizer.ggml.token_type"])
    merges = [tuple(m.split(" ", 1)) for m in meta["tokenizer.ggml.merges"]]
    t = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken(token, special=True, normalized=False)
                          for token, kind in zip(tokens, types) if kind == 3])
    fast = PreTrainedTokenizerFast(tokenizer_object=t, clean_up_tokenization_spaces=False)
    fast.chat_template = meta["tokenizer.chat_template"]
    return fast


def provenance(gguf):
    version = importlib.metadata.version
    return {"command": "LD_PRELOAD=libopenblas.so.0 python make_golden.py " + os.path.basename(gguf) + " golden.json",
            "model": os.path.basename(gguf), "model_sha256": hashlib.sha256(Path(gguf).read_bytes()).hexdigest(),
            "weights": "dequantized to float32", "python": platform.python_version(),
            "versions": {p: version(p) for p in ("mlx", "mlx-lm", "transformers", "tokenizers", "numpy")}}


if __name__ == "__main__":
    main(*sys.argv[1:])
