#!/usr/bin/env python3
"""Prefill rates of pd-prefill and of Hugging Face transformers (SDPA) on the same shape, in one run, alternating.

Random weights and random tokens on both sides, batch 1. pd-prefill runs as a child that takes one order at a time, so
each round measures: ours without streaming, transformers, ours with every layer's cache laid out, copied to the host
and sent over loopback TCP to a receiver that checks and counts it. Times are wall clock around the whole prefill; the
transformers side keeps its cache on the device and computes one token's logits. Medians of --runs rounds after one
warm-up round.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

SHAPES = {
    # layers, hidden, query heads, key heads, head dim, intermediate, vocabulary, model type, rope theta
    "llama-3.1-8b": (32, 4096, 32, 8, 128, 14336, 128256, "llama", 500000.0),
    "qwen2.5-7b": (28, 3584, 28, 4, 128, 18944, 152064, "qwen2", 1000000.0),
    "smollm2-135m": (30, 576, 9, 3, 64, 1536, 49152, "llama", 100000.0),
}


class Ours:
    """A pd-prefill child that runs one prefill per order."""

    def __init__(self, binary, shape, longest, chunk, precision):
        command = [binary, "bench", "--driven", "--shape", shape, "--tokens", str(longest), "--chunk", str(chunk)]
        self.child = subprocess.Popen(
            command + ["--precision", precision], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.about = json.loads(self.child.stdout.readline())["ready"]

    def run(self, tokens, sink):
        self.child.stdin.write(f"{tokens} {sink}\n")
        self.child.stdin.flush()
        return json.loads(self.child.stdout.readline())

    def close(self):
        self.child.stdin.close()
        self.child.wait()


class Transformers:
    """A model of random weights on the device."""

    def __init__(self, shape):
        import torch
        import transformers

        self.torch = torch
        layers, hidden, heads, kv_heads, head_dim, inner, vocab, kind, theta = SHAPES[shape]
        sizes = dict(
            num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads,
            head_dim=head_dim, intermediate_size=inner, vocab_size=vocab, max_position_embeddings=1 << 18,
            tie_word_embeddings=False, attn_implementation="sdpa",
        )
        names = {"llama": ("LlamaConfig", "LlamaForCausalLM"), "qwen2": ("Qwen2Config", "Qwen2ForCausalLM")}[kind]
        config = getattr(transformers, names[0])(**sizes, rope_parameters={"rope_type": "default", "rope_theta": theta})
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            model = getattr(transformers, names[1])(config)
        self.model = model.to_empty(device="cuda").eval()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            rotary = self.model.model.rotary_emb
            self.model.model.rotary_emb = type(rotary)(config=config).to("cuda")
        self.vocab = vocab
        self.about = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def run(self, tokens):
        torch = self.torch
        ids = torch.randint(0, self.vocab, (1, tokens), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            out = self.model(ids, use_cache=True, logits_to_keep=1)
        torch.cuda.synchronize()
        elapsed_ms = (time.perf_counter() - start) * 1e3
        finite = bool(torch.isfinite(out.logits).all())
        del out
        if not finite:
            sys.exit("transformers computed something that is not finite")
        return elapsed_ms


def spread(values):
    return f"{statistics.median(values):9.0f} ({min(values):.0f}..{max(values):.0f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="./pd-prefill")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--tokens", default="2048,8192,32768,131072")
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--precisions", default="bf16")
    parser.add_argument("--json", default=None, help="also write every single time to this file")
    args = parser.parse_args()
    lengths = [int(n) for n in args.tokens.split(",")]

    theirs = Transformers(args.shape)
    ours = {p: Ours(args.binary, args.shape, max(lengths), args.chunk, p) for p in args.precisions.split(",")}
    print(f"# {args.shape}, chunk {args.chunk}, medians of {args.runs} rounds; {theirs.about}")
    for name, child in ours.items():
        print(f"# {name}: {child.about}")
    print(f"{'tokens':>7} {'who':<14} {'tok/s (spread)':>30} {'x theirs':>9} {'overhead':>9} {'commit lag':>11}")
    raw = {}
    for tokens in lengths:
        times = {}
        for round_index in range(args.runs + 1):
            theirs_ms = theirs.run(tokens)
            results = {"transformers": (theirs_ms, 0.0)}
            for name, child in ours.items():
                # A device that heats up slows down: taking turns at going first treats both sinks alike.
                for sink in (("null", "tcp"), ("tcp", "null"))[round_index % 2]:
                    run = child.run(tokens, sink)
                    results[f"{name} {sink}"] = (run["total_ms"], run["commit_lag_ms"])
            if round_index > 0:
                for who, value in results.items():
                    times.setdefault(who, []).append(value)
        raw[tokens] = times
        base = statistics.median(ms for ms, _ in times["transformers"])
        for who, values in sorted(times.items(), key=lambda item: (item[0] != "transformers", item[0])):
            ms = statistics.median(v for v, _ in values)
            rates = [tokens / v * 1e3 for v, _ in values]
            overhead = lag = ""
            if who.endswith("tcp"):
                null_ms = statistics.median(v for v, _ in times[who.replace("tcp", "null")])
                overhead = f"{(ms / null_ms - 1) * 100:+.1f} %"
                lag = f"{statistics.median(v for _, v in values):.2f} ms"
            print(f"{tokens:>7} {who:<14} {spread(rates):>30} {base / ms:>8.2f}x {overhead:>9} {lag:>11}", flush=True)
    for child in ours.values():
        child.close()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(raw, file)


if __name__ == "__main__":
    main()
