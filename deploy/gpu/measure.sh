#!/usr/bin/env bash
# Everything that this project claims about a GPU, measured in one go on the machine it runs on. Takes about six
# minutes on an H200. Results go to standard output, single values to ./results (or the folder in RESULTS).
#
# MODEL=path   also compares the cache arrays of a real model on the GPU with the CPU backend's
# PYTHON=…     an interpreter with torch and transformers (default python3)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

export LD_LIBRARY_PATH=/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}
readonly RESULTS=${RESULTS:-results} PYTHON=${PYTHON:-python3}
mkdir -p "$RESULTS"
failed=0

section() { printf '\n== %s\n' "$1"; }
attempt() { "$@" || { failed=1; echo "FAILED ($?): $*"; }; }

section "device"
nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader
lscpu | sed -n 's/^Model name: */CPU /p; s/^CPU(s): */CPUs /p'

section "start to first prefill, small random model: compiled kernels absent, then present"
cache=$(mktemp -d)
for state in cold warm; do
  echo "$state"
  (time XDG_CACHE_HOME=$cache ./pd-prefill bench --shape smollm2-135m --tokens 64 --runs 1 --sink null >/dev/null) 2>&1 | sed -n 's/^real\t/  /p'
done
rm -rf "$cache"

section "kernels against float64"
attempt ./pd-prefill check-kernels --device --no-compile >"$RESULTS/check.txt"
tail -n 1 "$RESULTS/check.txt"
grep -v '^ok' "$RESULTS/check.txt" | grep FAIL

section "rates of single kernels"
attempt ./pd-prefill bench-kernels | tee "$RESULTS/kernels.txt"

section "against transformers + SDPA, alternating"
attempt "$PYTHON" compare_transformers.py --shape llama-3.1-8b --tokens 2048,8192,32768 --precisions bf16,fp8 --json "$RESULTS/llama.json"
attempt "$PYTHON" compare_transformers.py --shape llama-3.1-8b --tokens 131072 --runs 3 --json "$RESULTS/llama-128k.json"
attempt "$PYTHON" compare_transformers.py --shape smollm2-135m --tokens 2048 --json "$RESULTS/smollm2.json"
attempt "$PYTHON" compare_transformers.py --shape qwen2.5-7b --tokens 8192 --json "$RESULTS/qwen.json"

section "stages and memory"
attempt ./pd-prefill bench --shape llama-3.1-8b --tokens 2048,8192,32768 | tee "$RESULTS/stages.txt"
attempt ./pd-prefill bench --shape llama-3.1-8b --tokens 131072 --runs 1 --sink tcp | tee -a "$RESULTS/stages.txt"
echo "with the decoder's own key and value projections in every layer"
attempt ./pd-prefill bench --shape llama-3.1-8b --tokens 8192 --decoder-projections | tee -a "$RESULTS/stages.txt"

if [[ -n ${MODEL:-} ]]; then
  section "cache arrays of a real model, GPU against CPU"
  "$PYTHON" -c 'import json; print([p["prompt_ids"][:-1] for p in json.load(open("prompts.json"))["prompts"]])' >"$RESULTS/prompts.json"
  attempt ./pd-prefill compare --model "$MODEL" --tokens-file "$RESULTS/prompts.json" --precision bf16 | tee "$RESULTS/compare-bf16.txt"
  ./pd-prefill compare --model "$MODEL" --tokens-file "$RESULTS/prompts.json" --precision f16,fp8 --limit 1 | tee "$RESULTS/compare-others.txt"
fi
exit $failed
