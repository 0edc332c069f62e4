#!/bin/sh
# Usage: .ci/beside.sh MAIN COMMAND... Runs MAIN in the foreground and the COMMANDs, one after another, meanwhile. Then
# prints their output. All of them run, whichever fails; the status is 0 if none does.
set -u
main=$1
shift
said=$(mktemp)
(
    status=0
    for command in "$@"; do
        $command >>"$said" 2>&1 || { status=1 && echo "failed: $command" >>"$said"; }
    done
    exit "$status"
) &
beside=$!
trap 'kill "$beside" 2>/dev/null; rm -f "$said"; exit 130' INT TERM
status=0
echo "$main"
$main || status=$?
wait "$beside" || status=1
cat "$said"
rm -f "$said"
exit "$status"
