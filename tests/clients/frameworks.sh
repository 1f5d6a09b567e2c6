#!/usr/bin/env bash
# frameworks.sh ARGS…: Python with the packages of frameworks/requirements.txt, kept in .cache/client-frameworks/. They are
# many and heavy, and would pull the small ones of python.sh along with their versions.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$("$here/venv.sh" client-frameworks "$here/frameworks/requirements.txt")
exec "$python" "$@"
