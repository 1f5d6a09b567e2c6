#!/usr/bin/env python3
"""This gateway beside others, in front of one scripted token source, taking turns, on the same cores, one client.

usage: run.py [--rounds 3] [--only NAME,…] [--json FILE] [--markdown FILE] [--quick]

Peers come from their packages (requirements.txt, package.json) into .cache/peers. Every round runs every scenario on
every gateway before the next round begins, so that a slow minute of the machine hits all of them. "direct" is the client
on the source without a gateway; what a gateway adds is its own quantile minus that of `direct` in the same round.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import contestants
import table

ROOT = contestants.ROOT
MODEL = ROOT / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"


def scenarios(quick):
    seconds = 2 if quick else 5
    for rate in (50, 200, 500):
        yield f"rate_{rate}", ["rate", "--per-s", rate, "--seconds", seconds]
    yield "max", ["max", "--connections", 32, "--seconds", seconds]
    vocabulary = ["--vocabulary", MODEL]
    yield "streams_1", ["streams", "--streams", 1, "--tokens", 200, "--pace-us", 10_000, *vocabulary]
    yield "streams_64", ["streams", "--streams", 64, "--tokens", 100, "--pace-us", 20_000, *vocabulary]
    yield "streams_1000", ["streams", "--streams", 1000, "--tokens", 60 if quick else 100, "--pace-us", 100_000, *vocabulary]


def main():
    args = arguments()
    prefix = ["taskset", "-c", args.cores] if args.cores else []
    if args.nice:
        take_right_of_way(args.nice)
    with tempfile.TemporaryDirectory() as scratch:
        source_process, source = start_source(args, prefix)
        try:
            results = compare(args, prefix, source, scratch)
        finally:
            source_process.terminate()
            source_process.wait()
    text = table.markdown(results)
    print(text)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    if args.markdown:
        Path(args.markdown).write_text(text)
    if any(run["failures"] for run in results["runs"] if run["gateway"] == "pd-bridge"):
        sys.exit("requests to pd-bridge failed")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="gateways to run, besides direct, separated by commas")
    parser.add_argument("--bin", default=str(ROOT / "target/release"), help="folder of pd-source and pd-load")
    parser.add_argument("--pd-bridge", default=str(ROOT / "target/dist/pd-bridge"), help="this gateway's program")
    parser.add_argument("--cores", help="cores for everything, as taskset takes them (default: all)")
    parser.add_argument("--nice", type=int, default=0, help="priority of everything that is measured, on a shared machine")
    parser.add_argument("--quick", action="store_true", help="shorter scenarios")
    parser.add_argument("--scenarios", help="names of scenarios to run, separated by commas")
    parser.add_argument("--json", help="write all numbers to this file")
    parser.add_argument("--markdown", help="write the table to this file")
    return parser.parse_args()


def take_right_of_way(nice):
    """Linux shares the CPU between sessions first, so priority among others is a matter of the session's own group."""
    os.setsid() if os.getsid(0) != os.getpid() else None
    group = Path("/proc/self/autogroup")
    if group.exists():
        group.write_text(str(nice))
    else:
        os.nice(nice)


def start_source(args, prefix):
    command = [*prefix, str(Path(args.bin) / "pd-source"), "--model", str(MODEL)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    source = json.loads(process.stdout.readline())
    return process, source | {"pid": process.pid, "pd_bridge": args.pd_bridge, "model_file": MODEL}


def compare(args, prefix, source, scratch):
    wanted = [c for c in contestants.ALL if not args.only or c.name in ("direct", *args.only.split(","))]
    running, missing = [], {}
    try:
        for kind in wanted:
            try:
                running.append(kind(source, scratch).start(prefix))
            except (contestants.Missing, subprocess.CalledProcessError, OSError) as why:
                missing[kind.name] = str(why)
                print(f"{kind.name}: left out: {why}", file=sys.stderr)
        chosen = [s for s in scenarios(args.quick) if not args.scenarios or s[0] in args.scenarios.split(",")]
        for gateway in running:  # Caches, pools and interpreters warm up outside the measurement.
            measure(args, prefix, gateway, ["max", "--connections", 8, "--seconds", 2])
        runs = []
        for round_number in range(args.rounds):
            for name, arguments_ in chosen:
                for gateway in running:
                    report = measure(args, prefix, gateway, arguments_)
                    runs.append({"round": round_number, "scenario": name, "gateway": gateway.name, **report})
                    note(runs[-1])
    finally:
        for gateway in running:
            gateway.stop()
    return {
        "machine": {"cpu": cpu(), "cores": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg()},
        "date": time.strftime("%Y-%m-%d %H:%M"), "rounds": args.rounds,
        "gateways": {g.name: g.settings for g in running}, "missing": missing, "runs": runs,
    }


def measure(args, prefix, gateway, arguments_):
    command = [*prefix, Path(args.bin) / "pd-load", "--addr", gateway.addr, "--model", gateway.model, "--pid", gateway.pid]
    if gateway.api_key:
        command += ["--api-key", gateway.api_key]
    done = subprocess.run([*map(str, command), *map(str, arguments_)], capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"pd-load: {done.stderr}")
    time.sleep(0.3)
    return json.loads(done.stdout)


def note(run):
    key = "on_the_way" if "streams" in run["scenario"] else "answer"
    print(f"{run['round']} {run['scenario']:13} {run['gateway']:14} p50 {run[key]['p50_us']:>8} p99 {run[key]['p99_us']:>8} us"
          f"  {run['answers']:>6} answers {run['failures']:>4} failed  cpu {run['cpu_s']:.2f} s"
          + (f"  first failure: {run['first_failure']}" if run["failures"] else ""), file=sys.stderr, flush=True)


def cpu():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
