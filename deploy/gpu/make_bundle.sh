#!/usr/bin/env bash
# Builds pd-prefill and puts it with its GPU scripts into target/gpu-bundle, to be copied to a GPU machine as it is.
# That machine needs an NVIDIA driver, CUDA 13's libraries and, for the comparison, Python with torch and transformers.
set -euo pipefail

readonly HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly ROOT=$(cd "$HERE/../.." && pwd)
readonly BUNDLE=$ROOT/target/gpu-bundle
readonly LIMIT_KIB=$((60 * 1024))

cd "$ROOT"
cargo build --release -p prefill-worker --bin pd-prefill
rm -rf "$BUNDLE"
mkdir -p "$BUNDLE"
cp "${CARGO_TARGET_DIR:-target}/release/pd-prefill" "$BUNDLE/"
strip "$BUNDLE/pd-prefill"
cp "$HERE/compare_transformers.py" "$HERE/measure.sh" "$HERE/README.md" "$BUNDLE/"
cp "$ROOT/tests/golden/smollm2-135m-instruct.json" "$BUNDLE/prompts.json"

size_kib=$(du -sk "$BUNDLE" | cut -f1)
if ((size_kib > LIMIT_KIB)); then
  echo "the bundle takes $size_kib KiB, allowed are $LIMIT_KIB" >&2
  exit 1
fi
echo "$BUNDLE: $size_kib KiB; on the GPU machine run ./measure.sh in it"
