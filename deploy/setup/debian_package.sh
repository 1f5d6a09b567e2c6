#!/usr/bin/env bash
# debian_package.sh PACKAGE: unpacks a Debian package, with those packages it depends on that this machine lacks, to
# .cache/debian/PACKAGE and prints that folder. Needs apt and dpkg but no root; nothing is installed.
# For programs that tests run: PATH and LD_LIBRARY_PATH must point into the folder (usr/bin, usr/lib/*).
set -euo pipefail

readonly PACKAGE=$1
readonly ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
readonly TARGET=$ROOT/.cache/debian/$PACKAGE
readonly LISTS=$ROOT/.cache/debian/lists
work=

main() {
  if [[ ! -e $TARGET/complete ]]; then
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || die "this system has no apt"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    uris >"$work/uris" || die "apt cannot name what $PACKAGE needs"
    [[ -s $work/uris ]] || die "$PACKAGE is installed already, but its program was not found in PATH"
    say "fetching $(wc -l <"$work/uris") packages for $PACKAGE"
    fetch "$work" || {
      # The lists may be older than what the archive holds.
      update && uris >"$work/uris" && fetch "$work" || die "apt cannot download $PACKAGE"
    }
    rm -rf "$TARGET"
    mkdir -p "$TARGET"
    local deb
    for deb in "$work"/*.deb; do dpkg-deb -x "$deb" "$TARGET"; done
    touch "$TARGET/complete"
  fi
  echo "$TARGET"
}

# The names of what would be installed, one `package=version` a line. A machine whose package lists are empty gets its own.
uris() {
  apt_get -s --no-install-recommends install "$PACKAGE" >/dev/null 2>&1 || update
  apt_get -s --no-install-recommends install "$PACKAGE" | sed -n 's/^Inst \([^ ]*\).* (\([^ ]*\) .*/\1=\2/p'
}

# Lists of this checkout's own: the system's may be written by root alone.
update() {
  say "reading Debian's package lists"
  mkdir -p "$LISTS/partial"
  apt_get -qq update >&2
}

fetch() {
  (cd "$1" && xargs bash -c 'lists=$0; opts=(); [[ -d $lists ]] && opts=(-o "Dir::State::Lists=$lists"); apt-get -qq "${opts[@]}" download "$@"' "$LISTS" <uris >&2)
}

apt_get() {
  local options=()
  [[ -d $LISTS ]] && options=(-o "Dir::State::Lists=$LISTS")
  apt-get "${options[@]}" "$@"
}

say() { echo "set-up: $*" >&2; }
die() {
  echo "set-up: $*; install the Debian package $PACKAGE, or its program by your system's means" >&2
  exit 1
}

main
