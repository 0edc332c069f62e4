"""Make `rerankers.npz`: what tiny rerankers give of pairs, and how `save_pretrained` writes them.

    python -m tests.goldens.make_rerankers

Run from the repository, in the environment of `requirements.txt`. A golden is stored only if every feature of
`tiny.offs` moves a number by ten times the tolerance, when it is off.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from .families.family import Off
from .make_encoders import places
from .oracle import quiet
from .rerankers import DOCUMENTS, FILE, QUERY, RERANKERS, TinyReranker

_SEEN = 1e-2


def main() -> None:
    quiet()
    arrays: dict[str, Any] = {}
    for name, tiny in RERANKERS.items():
        with tempfile.TemporaryDirectory() as directory:
            arrays[f"{name}_numbers"], about = scored(tiny, Path(directory))
        arrays[name] = np.array(json.dumps(about))
        for off in tiny.offs:
            with tempfile.TemporaryDirectory() as directory:
                others, _ = scored(tiny, Path(directory), off)
            moved = float(np.abs(others - arrays[f"{name}_numbers"]).max())
            if moved < _SEEN:
                raise SystemExit(f"{name}: without {off.feature} numbers move by {moved:.1e} only")
        print(name, arrays[f"{name}_numbers"])
    np.savez_compressed(FILE, **arrays)
    print(f"{len(RERANKERS)} rerankers, {FILE.stat().st_size:,} bytes")


@torch.inference_mode()
def scored(tiny: TinyReranker, path: Path, off: Off | None = None) -> tuple[np.ndarray, dict[str, Any]]:
    """The head's number of each pair; tokens and types of the pairs, and what is saved."""
    tiny.write(path, off)
    model, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if any(names for key, names in loading.items() if key != "error_msgs"):
        raise SystemExit(f"{tiny.name}: transformers has other tensors: {loading}")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    has_types = tiny.config.get("type_vocab_size", 0) == 2  # tokenizers of the other classes give no types
    numbers, pairs = [], []
    for document in DOCUMENTS:
        # in lists, as in a batch: a single empty document would count as none
        encoded = tokenizer([QUERY], [document], return_token_type_ids=True)
        [ids], [types] = encoded["input_ids"], encoded["token_type_ids"]
        given = {"token_type_ids": torch.tensor([types])} if has_types else {}
        numbers.append(model(input_ids=torch.tensor([ids]), **given).logits.item())
        pairs.append((ids, types))
    model.save_pretrained(path / "out")
    config = json.loads((path / "out" / "config.json").read_text())
    config.pop("transformers_version")
    saved = {} if off is not None else places(tiny, load_file(path / "out" / "model.safetensors"))
    return np.array(numbers), {"config": config, "names": saved, "pairs": pairs}


if __name__ == "__main__":
    main()
