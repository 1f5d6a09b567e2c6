#!/usr/bin/env bash
# Fetches NVIDIA's run-time compiler from its wheel, so that every kernel can be compiled on a machine without a GPU.
# Prints the folder with libnvrtc. Kernels include no headers, so nothing else of CUDA is needed.
set -euo pipefail

readonly VERSION=13.0.88
readonly ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
readonly TARGET=$ROOT/.cache/nvrtc
readonly LIBRARIES=$TARGET/$VERSION/nvidia/cu13/lib

if [[ ! -e $LIBRARIES/libnvrtc.so.13 ]]; then
  command -v python3 >/dev/null || { echo "python3 is needed to fetch NVRTC" >&2; exit 1; }
  rm -rf "$TARGET"
  mkdir -p "$TARGET/wheel"
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$TARGET/wheel" \
    "nvidia-cuda-nvrtc==$VERSION" >&2
  python3 -m zipfile -e "$TARGET"/wheel/*.whl "$TARGET/$VERSION"
  rm -rf "$TARGET/wheel"
fi
echo "$LIBRARIES"
