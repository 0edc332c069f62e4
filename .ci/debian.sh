#!/bin/sh
# Usage: .ci/debian.sh PROGRAM=PACKAGE... Installs the Debian packages of the programs that are missing.
set -eu
missing=
for pair in "$@"; do
    command -v "${pair%%=*}" >/dev/null 2>&1 || missing="$missing ${pair#*=}"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "this suite needs$missing; on Debian and Ubuntu, as root: apt-get install$missing" >&2
    exit 2
fi
echo "installing$missing"
# suites that run concurrently take turns
flock /tmp/radixlm-debian.lock sh -c "apt-get update -qq && \
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $missing >/dev/null"
