#!/usr/bin/env bash
# python.sh ARGS…: Python with the packages of requirements.txt, kept in .cache/clients/.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$("$here/venv.sh" clients "$here/requirements.txt")
exec "$python" "$@"
