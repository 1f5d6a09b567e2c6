#!/usr/bin/env bash
# python.sh ARGS…: Python with the packages of requirements.txt, kept in .cache/clients/.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$here/../../.cache/clients
if ! cmp -s "$here/requirements.txt" "$venv/requirements.txt"; then
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
  cp "$here/requirements.txt" "$venv/"
fi
exec "$venv/bin/python" "$@"
