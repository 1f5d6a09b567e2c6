#!/usr/bin/env bash
# venv.sh NAME REQUIREMENTS: makes .cache/NAME a virtual environment with exactly these packages, once, and prints its Python.
set -euo pipefail

venv=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/.cache/$1
readonly venv requirements=$2
if ! cmp -s "$requirements" "$venv/requirements.txt"; then
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements" >&2
  cp "$requirements" "$venv/"
fi
printf '%s\n' "$venv/bin/python"
