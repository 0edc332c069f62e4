#!/bin/sh
# Usage: .ci/peer_models.sh MODEL.gguf DIRECTORY PYTHON. Converts a GGUF file for OpenVINO and vLLM: DIRECTORY/hf has
# its weights dequantized, DIRECTORY/int8 and DIRECTORY/int4 OpenVINO's own formats. PYTHON has optimum-intel.
set -eu
model=$(realpath "$1")
directory=$2
python=$3

rm -rf "$directory"
mkdir -p "$directory"
echo "converting $model in $directory"
"$python" - "$model" "$directory/hf" <<'PYTHON'
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

model, directory = Path(sys.argv[1]), sys.argv[2]
AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(directory)
AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype="float32").save_pretrained(directory)
PYTHON
export_to() {
    "$(dirname "$python")/optimum-cli" export openvino --model "$directory/hf" --task text-generation-with-past "$@" \
        >>"$directory/export.log" 2>&1 || {
        tail -5 "$directory/export.log" >&2
        exit 1
    }
}
export_to --weight-format int8 "$directory/int8"
export_to --weight-format int4 --group-size 64 --ratio 1.0 "$directory/int4"
