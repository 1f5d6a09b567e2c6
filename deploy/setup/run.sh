#!/usr/bin/env bash
# run.sh MODEL PORT: starts everything on this machine and, once it is ready, prints a request to try.
# Ctrl-C, or SIGTERM to this script, stops it all.
set -euo pipefail

readonly MODEL=$1 PORT=$2 ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
readonly PIPE=$ROOT/.cache/run.$$

main() {
  mkfifo "$PIPE"
  "$ROOT/target/release/pd-bridge" up --model "$MODEL" --port "$PORT" >"$PIPE" &
  SERVER=$!
  trap 'kill -TERM "$SERVER" 2>/dev/null || true' INT TERM
  trap 'rm -f "$PIPE"' EXIT
  while IFS= read -r line; do
    printf '%s\n' "$line"
    case "$line" in ready*) suggest ;; esac
  done <"$PIPE"
  wait "$SERVER"
}

suggest() {
  cat <<TEXT

Try, in another terminal (the header X-PD-Bridge says who read the prompt: a long one goes over the bridge):

  curl -N -i http://127.0.0.1:$PORT/v1/chat/completions -H 'content-type: application/json' -d @deploy/example-request.json

TEXT
}

main
