#!/usr/bin/env bash
# prometheus.sh: prints the folder that holds `prometheus` and `promtool`, of major version 2 or 3.
#
# Those in PATH are taken where there are any (macOS: brew install prometheus). On Debian and its kin the package is
# fetched with apt and unpacked into .cache/prometheus/; nothing is installed, no root is needed.
set -euo pipefail

readonly MAJORS='2|3'
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly cache=$here/../../.cache/prometheus

die() {
  printf 'prometheus.sh: %s\n' "$*" >&2
  exit 1
}

# good FOLDER: both programs are there, run, and are of a known major version.
good() {
  local program
  for program in prometheus promtool; do
    [[ -x $1/$program ]] || return 1
    "$1/$program" --version 2>&1 | grep -qE "^$program, version ($MAJORS)\." || return 1
  done
}

found() {
  printf '%s\n' "$1"
  exit 0
}

if in_path=$(command -v prometheus); then
  good "$(dirname "$in_path")" && found "$(dirname "$in_path")"
fi
good "$cache/usr/bin" && found "$cache/usr/bin"

command -v apt-get >/dev/null && command -v dpkg >/dev/null ||
  die "install Prometheus 2 or 3 with promtool so that both are in PATH (macOS: brew install prometheus)"
mkdir -p "$(dirname "$cache")"
work=$(mktemp -d "$cache.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/state/lists/partial" "$work/archives/partial" "$work/unpacked"
apt() {
  apt-get -qq -o Dir::State::lists="$work/state/lists" -o Dir::Cache="$work" -o APT::Sandbox::User="$(id -un)" "$@" >&2
}
(cd "$work" && apt update && apt download prometheus) || die "apt cannot fetch the package prometheus, see above"
dpkg -x "$work"/prometheus_*.deb "$work/unpacked"
good "$work/unpacked/usr/bin" || die "the package prometheus of this system does not run here or is neither version 2 nor 3"
# Whoever was quicker has put the same there.
rm -rf "$cache"
mv "$work/unpacked" "$cache" 2>/dev/null || good "$cache/usr/bin" || die "cannot write $cache"
found "$cache/usr/bin"
