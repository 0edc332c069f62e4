#!/bin/sh
# Usage: .ci/suites.sh SUITE... Runs the suites, each as soon as a processor is free. A suite's output is kept in
# .cache/ci/SUITE.log, and printed in one piece when it ends. All of them run; the status is 0 if none fails.
set -u
logs=.cache/ci
mkdir -p "$logs"
export logs
printf '%s\n' "$@" | xargs -P "$(nproc)" -I SUITE sh -c '
    echo "make $1 began; its log is $logs/$1.log"
    status=0
    make "$1" >"$logs/$1.log" 2>&1 || status=1
    flock "$logs" sh -c "echo \"==== make $1 ended with status $status\"; cat \"$logs/$1.log\""
    exit "$status"' suite SUITE
