"""Write a model to load a server with: the shapes and tokenizer of Qwen2-0.5B, with random weights.

    python -m bench.load.model qwen2.radixlm [--hybrid 1]

It has four of the 24 layers, so that two cores serve fifty streams; width, heads, vocabulary and padding are those of
Qwen2-0.5B. With `--hybrid`, two of them are LFM2's short convolutions, which have a state. Needs the folder of real
inputs (`RADIXLM_DATA`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from radixlm.compile import compile_model

from ..data import data_dir
from ..options import read_options
from ..random_models import HybridShape, Shape, write_random_model
from ..replay.models import MODELS, read_tokenizer

SHAPE = Shape("qwen2", 896, 4864, 4, 14, 2, True, vocab_size=151_936, is_qwen2=True)
HYBRID = HybridShape("lfm2", 896, 4864, "caca", 14, 2, vocab_size=151_936)
_SPECIAL_IDS = (151_643, 151_645)  # <|endoftext|> and <|im_end|>


def main() -> None:
    """Compile an artifact of Qwen2-0.5B's shapes, or of a hybrid, with random weights."""
    options = read_options(__doc__, "artifact", hybrid=0)
    artifact, shape = options.artifact, HYBRID if options.hybrid else SHAPE
    model = MODELS["qwen2"]
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / shape.name
        tokenizer_json = read_tokenizer(model, data_dir())
        write_random_model(shape, source, tokenizer_json, chat_template=model.template, special_ids=_SPECIAL_IDS)
        print(compile_model(source, artifact, quantize="q4").path)


if __name__ == "__main__":
    main()
