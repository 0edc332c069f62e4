#!/bin/sh
# Pins the newest versions that pyproject.toml allows: requirements.lock to run, requirements-dev.lock to test,
# requirements-bench.lock to measure, those of browser, clients, agents, aider and instruments for the suites that only
# talk to a server, requirements-ray.lock for the one of several engines behind Ray Serve, requirements-wheel.lock to build
# and check what is published, requirements-docs.lock for the documentation site. requirements-serve.lock has what serving artifacts needs.
set -eu
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# resolve NAME: a fresh virtual environment with what $scratch/NAME.in asks for; what is in it, to $scratch/NAME
resolve() {
    "${PYTHON:-python3.11}" -m venv "$scratch/venv-$1"
    pip="$scratch/venv-$1/bin/pip --quiet --disable-pip-version-check"
    $pip install -r "$scratch/$1.in"
    $pip freeze --all | grep -v '^pip==' >"$scratch/$1"
}

"${PYTHON:-python3.11}" - "$scratch" <<'PYTHON'
import sys
import tomllib
from pathlib import Path

scratch = Path(sys.argv[1])
pyproject = tomllib.loads(Path("pyproject.toml").read_text())
run = pyproject["project"]["dependencies"] + pyproject["build-system"]["requires"]
(scratch / "run.in").write_text("\n".join(run))
for extra in ("dev", "bench"):
    wanted = ["-r run", *pyproject["project"]["optional-dependencies"][extra]]
    (scratch / f"{extra}.in").write_text("\n".join(wanted))
extras = pyproject["project"]["optional-dependencies"]
(scratch / "ray.in").write_text("\n".join(["-r run", *extras["ray"], "pytest>=8.3"]))
for extra in ("browser", "clients", "agents", "aider", "docs", "instruments", "wheel"):
    (scratch / f"{extra}.in").write_text("\n".join(pyproject["project"]["optional-dependencies"][extra]))
PYTHON

for name in run dev bench browser clients agents aider docs ray wheel; do resolve "$name"; done
# guidellm asks for torch, which brings 4 GB for GPUs, and uses its loader of data alone: tests/instruments has a stand-in
"${PYTHON:-python3.11}" -m venv "$scratch/venv-instruments"
"$scratch/venv-instruments/bin/pip" --quiet --disable-pip-version-check install --dry-run \
    --report "$scratch/instruments.json" -r "$scratch/instruments.in"
{
    echo '# What the suite tests/instruments needs, without radixlm, and without torch, of which it has a stand-in.'
    echo '# pip: --no-deps. Made by `make lock`.'
    "${PYTHON:-python3.11}" - "$scratch/instruments.json" <<'PYTHON'
import json
import sys

OF_TORCH = {"torch", "triton", "sympy", "mpmath", "networkx", "setuptools"}
with open(sys.argv[1]) as file:
    found = [each["metadata"] for each in json.load(file)["install"]]
for each in sorted(found, key=lambda each: each["name"].lower()):
    is_of_gpu = each["name"].startswith(("nvidia-", "cuda-")) and each["name"] != "nvidia-ml-py"
    if each["name"] not in OF_TORCH and not is_of_gpu:
        print(f"{each['name']}=={each['version']}")
PYTHON
} >requirements-instruments.lock
{
    echo '# What building the documentation site needs, without radixlm. Made by `make lock`.'
    cat "$scratch/docs"
} >requirements-docs.lock
for suite in browser clients agents aider wheel; do
    {
        echo "# What the suite tests/$suite needs, without radixlm. Made by \`make lock\`."
        cat "$scratch/$suite"
    } >"requirements-$suite.lock"
done
{
    echo '# What radixlm needs to run, as resolved on Python 3.11 and checked on 3.12 and 3.13. Made by `make lock`.'
    cat "$scratch/run"
} >requirements.lock
{
    echo '# What serving artifacts needs: no compiler, and no huggingface-hub, which tokenizers asks for and does not load.'
    echo '# pip: --no-deps. Made by `make lock`.'
    "$scratch/venv-run/bin/python" .ci/needed.py "$scratch/run"
} >requirements-serve.lock
{
    echo '# What testing radixlm needs beside it. Made by `make lock`.'
    echo '-r requirements.lock'
    grep -vxFf "$scratch/run" "$scratch/dev"
} >requirements-dev.lock
{
    echo '# What the benchmarks need beside it. Made by `make lock`.'
    echo '-r requirements.lock'
    grep -vxFf "$scratch/run" "$scratch/bench"
} >requirements-bench.lock
{
    echo '# What the suite tests/ray needs beside what radixlm runs on. Made by `make lock`.'
    echo '-r requirements.lock'
    grep -vxFf "$scratch/run" "$scratch/ray"
} >requirements-ray.lock
