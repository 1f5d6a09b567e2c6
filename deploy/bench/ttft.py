#!/usr/bin/env python3
"""Time to first token on this machine: the decoder alone against the bridge, cold prompts, taking turns.

usage: ttft.py [--model PATH] [--runs 5] [--words 1700] [--json FILE] [--mlx-lm PYTHON]

Starts `pd-bridge up`, sends every prompt once (so nothing is cached), native and bridged in turn, and prints medians.
Everything is measured from outside: times at the client, counts from the verdict, memory from /proc. With `--mlx-lm`
(a Python that has mlx-lm and transformers, see tests/golden/requirements.txt) mlx-lm decodes on the same weights in the
same run, after the servers have stopped.
"""

import argparse
import http.client
import json
import os
import random
import socket
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ANSWER_TOKENS = 33
WORDS = ("apple river stone cloud engine winter garden pencil mirror bridge castle doctor forest guitar hammer island "
         "jacket kitten ladder market needle orange palace quiver rabbit saddle temple umbrella valley window yellow zebra "
         "seven twelve quickly slowly brought wrote carried under behind across before after because although while").split()


def main():
    args = arguments()
    server = subprocess.Popen([args.bin, "up", "--model", args.model, "--port", str(free_port())],
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        line = server.stdout.readline().strip()
        if not line.startswith("ready http://"):
            sys.exit("pd-bridge did not become ready; run it by hand to see why")
        results = measure(line.removeprefix("ready http://"), server.pid, args)
    finally:
        server.terminate()
        server.wait(60)
    if args.mlx_lm:
        results["mlx_lm_decode_tokens_per_s"] = mlx_lm(args.mlx_lm, args.model, results["prompt_tokens"])
    report = summary(results, args)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    if report["verdicts_bridged"] != ["complete"]:
        sys.exit(f"not every bridged run was complete: {report['verdicts_bridged']}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(ROOT / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--bin", default=str(ROOT / "target/release/pd-bridge"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--words", type=int, default=1700, help="length of a prompt; of these words, most are one token")
    parser.add_argument("--json", help="write all numbers to this file")
    parser.add_argument("--mlx-lm", metavar="PYTHON", help="also measure mlx-lm's decode rate with this Python")
    return parser.parse_args()


def measure(addr, pid, args):
    rng = random.Random(os.getpid())
    prompt = lambda words: " ".join(rng.choice(WORDS) for _ in range(words)) + "\nSummary:"
    workers = {name: p for p in children(pid) if (name := program(p)) in ("pd-decode", "pd-prefill")}
    for route in ("native", "bridge"):  # threads, scratch memory
        complete(addr, prompt(200), route, 4)
    runs = {"native": [], "bridge": []}
    peaks = {name: [] for name in workers}
    for _ in range(args.runs):
        for route in runs:
            before = {name: reset_peak(p) for name, p in workers.items()}
            runs[route].append(complete(addr, prompt(args.words), route, ANSWER_TOKENS))
            if route == "bridge":
                for name, p in workers.items():
                    peaks[name].append(memory(p, "VmHWM") - before[name])
    tokens = int(statistics.median(r["verdict"]["prompt_tokens"] for r in runs["native"] + runs["bridge"]))
    return {"runs": runs, "peak_growth_bytes": {n: max(p) for n, p in peaks.items() if p}, "prompt_tokens": tokens}


def complete(addr, prompt, route, max_tokens):
    """One streamed completion: time to the first token, and the rate of the tokens after it."""
    connection = http.client.HTTPConnection(addr, timeout=600)
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True,
                       "stream_options": {"include_usage": True}})
    started = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json", "x-pd-bridge-route": route})
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"HTTP {response.status}: {response.read()[:500]}")
    verdict = json.loads(response.headers["x-pd-bridge"])
    first = last = completion_tokens = None
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("usage"):
            completion_tokens = event["usage"]["completion_tokens"]
        elif event["choices"] and event["choices"][0].get("text"):
            last = time.perf_counter() - started
            first = first or last
    connection.close()
    rate = (completion_tokens - 1) / (last - first) if completion_tokens and completion_tokens > 1 else None
    return {"ttft_s": first, "decode_tokens_per_s": rate, "completion_tokens": completion_tokens, "verdict": verdict}


def summary(results, args):
    median = lambda route, f: statistics.median(x for r in results["runs"][route] if (x := f(r)) is not None)
    ttft = {route: median(route, lambda r: r["ttft_s"]) for route in results["runs"]}
    decode = {route: median(route, lambda r: r["decode_tokens_per_s"]) for route in results["runs"]}
    rate = lambda tokens: lambda r: r["verdict"][tokens] / r["verdict"]["prefill_ms"] * 1000 if r["verdict"]["prefill_ms"] else None
    native, bridged = median("native", rate("native_tokens")), median("bridge", rate("bridged_tokens"))
    per_token = cache_bytes_per_token(args.model)
    payload = [r["verdict"]["payload_bytes"] / r["verdict"]["bridged_tokens"] / per_token
               for r in results["runs"]["bridge"] if r["verdict"]["bridged_tokens"]] if per_token else []
    report = {
        "prompt_tokens": results["prompt_tokens"], "runs": args.runs, "machine": machine(),
        "ttft_native_s": ttft["native"], "ttft_bridged_s": ttft["bridge"], "ttft_ratio": ttft["bridge"] / ttft["native"],
        "prefill_native_tokens_per_s": native, "prefill_worker_tokens_per_s": bridged, "prefill_ratio": bridged / native,
        "decode_native_tokens_per_s": decode["native"], "decode_bridged_tokens_per_s": decode["bridge"],
        "decode_ratio": decode["bridge"] / decode["native"],
        "transfer_not_hidden_ms": median("bridge", lambda r: r["verdict"]["transfer_ms"]),
        "ingest_ms": median("bridge", lambda r: r["verdict"]["ingest_ms"]),
        "payload_per_cache_byte": max(payload) if payload else None,
        "cache_bytes": per_token and per_token * results["prompt_tokens"],
        "peak_growth_bytes": results["peak_growth_bytes"],
        "verdicts_native": sorted({r["verdict"]["verdict"] for r in results["runs"]["native"]}),
        "verdicts_bridged": sorted({r["verdict"]["verdict"] for r in results["runs"]["bridge"]}),
        "all_but_one_cached": all(r["verdict"]["cached_tokens"] == r["verdict"]["prompt_tokens"] - 1
                                  for r in results["runs"]["bridge"]),
    }
    if results.get("mlx_lm_decode_tokens_per_s"):
        report["mlx_lm_decode_tokens_per_s"] = results["mlx_lm_decode_tokens_per_s"]
        report["decode_ratio_to_mlx_lm"] = decode["bridge"] / results["mlx_lm_decode_tokens_per_s"]
    report["all_runs"] = results["runs"]
    return report


def table(r):
    mib = lambda b: f"{b / 2**20:.0f} MiB"
    rows = [("", "native", "bridged", "ratio"),
            ("time to first token", f"{r['ttft_native_s']:.2f} s", f"{r['ttft_bridged_s']:.2f} s", f"{r['ttft_ratio']:.3f}"),
            ("prompt tokens per second", f"{r['prefill_native_tokens_per_s']:.0f}", f"{r['prefill_worker_tokens_per_s']:.0f}", f"{r['prefill_ratio']:.2f}"),
            ("answer tokens per second", f"{r['decode_native_tokens_per_s']:.2f}", f"{r['decode_bridged_tokens_per_s']:.2f}", f"{r['decode_ratio']:.3f}")]
    lines = [f"{r['prompt_tokens']} prompt tokens, medians of {r['runs']}, {r['machine']}", ""]
    lines += [f"{a:<26}{b:>12}{c:>12}{d:>10}" for a, b, c, d in rows] + [""]
    if "mlx_lm_decode_tokens_per_s" in r:
        lines.append(f"mlx-lm answers at {r['mlx_lm_decode_tokens_per_s']:.2f} tokens/s on the same weights: "
                     f"bridged is {r['decode_ratio_to_mlx_lm']:.3f} of that")
    lines.append(f"verdicts: native {', '.join(r['verdicts_native'])}; bridged {', '.join(r['verdicts_bridged'])}; "
                 f"all but the last token from cache: {'yes' if r['all_but_one_cached'] else 'NO'}")
    lines.append(f"transfer not hidden {r['transfer_not_hidden_ms']:.1f} ms, ingest {r['ingest_ms']:.1f} ms")
    if r["payload_per_cache_byte"]:
        growth = ", ".join(f"{n} {mib(b)}" for n, b in r["peak_growth_bytes"].items())
        lines.append(f"payload {r['payload_per_cache_byte']:.4f} of the cache's {mib(r['cache_bytes'])}; "
                     f"peak memory over one bridged prompt, caches included: {growth}")
    return "\n".join(lines)


def cache_bytes_per_token(model):
    """K and V of all layers in f32, the decoder's default on a CPU."""
    if Path(model).is_dir():
        c = json.loads((Path(model) / "config.json").read_text())
        heads = c["num_attention_heads"]
        dim = c.get("head_dim") or c["hidden_size"] // heads
        return c["num_hidden_layers"] * 2 * c.get("num_key_value_heads", heads) * dim * 4
    with open(model, "rb") as f:
        v = gguf_numbers(f)
    dim = v["llama.embedding_length"] // v["llama.attention.head_count"]
    return v["llama.block_count"] * 2 * v["llama.attention.head_count_kv"] * dim * 4


def gguf_numbers(f):
    """The integer values of a GGUF header; stops at the first array, which in practice comes after them."""
    sizes = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    read = lambda fmt: struct.unpack("<" + fmt, f.read(struct.calcsize("<" + fmt)))[0]
    text = lambda: f.read(read("Q")).decode()
    f.seek(16)
    values = {}
    for _ in range(read("Q")):
        key, kind = text(), read("I")
        if kind == 8:
            text()
        elif kind == 9:
            element, count = read("I"), read("Q")
            for _ in range(count):
                text() if element == 8 else read(sizes[element])
        else:
            values[key] = read(sizes[kind])
    return values


def children(pid):
    out = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            out += [int(child)] + children(int(child))
    return out


def program(pid):
    return os.path.basename(os.readlink(f"/proc/{pid}/exe"))


def memory(pid, field):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def reset_peak(pid):
    """Starts the kernel's peak counter again; gives the memory resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return memory(pid, "VmRSS")


def machine():
    model = next((l.split(":")[1].strip() for l in Path("/proc/cpuinfo").read_text().splitlines() if l.startswith("model name")), "?")
    return f"{os.cpu_count()} cores, {model}"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def mlx_lm(python, model, prompt_tokens):
    """mlx-lm's decode rate after a prompt of the same length, on the same weights as float32."""
    code = f"""
import sys, time, tempfile, pathlib
sys.path.insert(0, {str(ROOT / 'tests/golden')!r})
sys.dont_write_bytecode = True
import make_golden as golden, mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model
arrays, meta = mx.load({model!r}, return_metadata=True)
with tempfile.TemporaryDirectory() as folder:
    golden.write_model(pathlib.Path(folder), arrays, meta)
    model, _ = load_model(pathlib.Path(folder))
ids = mx.array([3 + i * 7919 % 49000 for i in range({prompt_tokens})])
times = [time.perf_counter() for _ in generate_step(ids, model, max_tokens={ANSWER_TOKENS})]
print((len(times) - 1) / (times[-1] - times[0]))
"""
    env = os.environ | {"LD_PRELOAD": "libopenblas.so.0"}
    rates = [float(subprocess.run([python, "-c", code], env=env, check=True, capture_output=True, text=True).stdout)
             for _ in range(3)]
    return statistics.median(rates)


if __name__ == "__main__":
    main()
