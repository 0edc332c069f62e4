#!/bin/sh
# Usage: .ci/venv.sh VENV LOCK [alone]. Makes the virtual environment VENV if it is missing, and installs the pins of
# LOCK and radixlm itself, editable; `alone`, for suites that only use its server, without radixlm. Uses the first
# Python of 3.11 or newer; PYTHON names another.
set -eu
venv=$1
lock=$2
alone=${3:-}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

if ! new_enough "$venv/bin/python"; then
    for python in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if new_enough "$python"; then break; fi
        python=
    done
    if [ -z "$python" ]; then
        found=$(python3 --version 2>/dev/null || echo "no python3")
        echo "radixlm needs Python 3.11 or newer, found $found; install one, or name it: make run PYTHON=/path/to/python" >&2
        exit 2
    fi
    echo "making $venv with $("$python" --version)"
    rm -rf "$venv"
    if ! "$python" -m venv "$venv"; then
        rm -rf "$venv"
        echo "this Python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2
        exit 2
    fi
fi
echo "installing $lock"
no_deps=$(sed -n 's/^# pip: \(--no-deps\).*/\1/p' "$lock")  # what it leaves out on purpose is not to come by itself
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check $no_deps -r "$lock"
[ -z "$alone" ] || exit 0
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
