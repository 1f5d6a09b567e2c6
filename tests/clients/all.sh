#!/usr/bin/env bash
# all.sh: fetches every tool that the tests judge with, once, so that tests that start together find them there.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$here/../..

"$here/python.sh" --version >/dev/null
"$here/frameworks.sh" --version >/dev/null
"$here/node.sh" --version >/dev/null
"$here/nats_server.sh" >/dev/null
"$here/prometheus.sh" >/dev/null
"$here/../suites/json_schema.sh" >/dev/null
browser=
for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then browser=$name; fi
done
if [[ -z ${PD_TEST_CHROMIUM:-}$browser && ! -e "/Applications/Google Chrome.app" ]]; then
  "$root/deploy/setup/debian_package.sh" chromium >/dev/null
fi
