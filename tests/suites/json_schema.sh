#!/usr/bin/env bash
# json_schema.sh: prints the folder with the tests of the JSON Schema Test Suite, kept in .cache/json-schema-suite/.
# The source package of `jsonschema` on PyPI brings the whole suite.
set -euo pipefail

readonly VERSION=4.26.0
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly cache=$here/../../.cache/json-schema-suite

if [[ ! -d $cache/$VERSION/tests ]]; then
  mkdir -p "$cache"
  work=$(mktemp -d "$cache/fetch.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-binary jsonschema \
    --dest "$work" "jsonschema==$VERSION"
  tar -xzf "$work/jsonschema-$VERSION.tar.gz" -C "$work"
  mv "$work/jsonschema-$VERSION/json" "$cache/$VERSION"
fi
cd "$cache/$VERSION/tests" && pwd
