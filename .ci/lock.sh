#!/bin/sh
# Pins the newest versions that pyproject.toml allows: requirements.lock to run, requirements-dev.lock to test.
set -eu
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
pip="$scratch/venv/bin/pip --quiet --disable-pip-version-check"

"${PYTHON:-python3.11}" -m venv "$scratch/venv"
"$scratch/venv/bin/python" - "$scratch" <<'PYTHON'
import sys
import tomllib
from pathlib import Path

scratch = Path(sys.argv[1])
pyproject = tomllib.loads(Path("pyproject.toml").read_text())
run = pyproject["project"]["dependencies"] + pyproject["build-system"]["requires"]
(scratch / "run.in").write_text("\n".join(run))
(scratch / "dev.in").write_text("\n".join(pyproject["project"]["optional-dependencies"]["dev"]))
PYTHON

$pip install -r "$scratch/run.in"
$pip freeze --all | grep -v '^pip==' >"$scratch/run"
$pip install -r "$scratch/dev.in"
$pip freeze --all | grep -v '^pip==' >"$scratch/dev"
{
    echo '# What radixlm needs to run, as resolved on Python 3.11 and checked on 3.12 and 3.13. Made by `make lock`.'
    cat "$scratch/run"
} >requirements.lock
{
    echo '# What testing radixlm needs beside it. Made by `make lock`.'
    echo '-r requirements.lock'
    grep -vxFf "$scratch/run" "$scratch/dev"
} >requirements-dev.lock
