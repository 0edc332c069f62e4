"""Make `embeddings.npz`: what tiny families give of texts without an output matrix, and a reranker's scores.

    python -m tests.goldens.make_embeddings

Run from the repository, in the environment of `requirements.txt`.
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

from .embeddings import DOCUMENTS, FAMILIES, FILE, INSTRUCTION, LENGTHS, NO, QUERY, RERANKER, YES, prompts_of
from .oracle import quiet
from .saved import tiny_of

_HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def main() -> None:
    quiet()
    torch.manual_seed(0)
    arrays: dict[str, Any] = {}
    for name in FAMILIES:
        arrays |= hidden_states(name)
    arrays["scores"] = np.array(scores(RERANKER), np.float64)
    np.savez_compressed(FILE, **arrays)
    print(f"{len(FAMILIES)} families, {FILE.stat().st_size:,} bytes")


@torch.inference_mode()
def hidden_states(name: str) -> dict[str, Any]:
    """Of a family's class without an output matrix: its configuration, its names, and what it computes."""
    family, changes = FAMILIES[name]
    tiny = tiny_of(family)
    with tempfile.TemporaryDirectory() as directory:
        path = tiny.write(Path(directory))
        (path / "config.json").write_text(json.dumps({**tiny.config, **changes}))
        model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        model.save_pretrained(path / "out")
        config = json.loads((path / "out" / "config.json").read_text())
        theirs = load_file(path / "out" / "model.safetensors")
    names = {ours: ours.removeprefix("model.") for ours in tiny.tensors if ours.removeprefix("model.") in theirs}
    if names.values() ^ theirs.keys() or any((theirs[own] != tiny.tensors[ours]).any() for ours, own in names.items()):
        raise SystemExit(f"{name}: transformers saves other tensors")
    config = {key: value for key, value in config.items() if key != "transformers_version"}
    if changes:  # loading halves the window, and saving writes that down
        config["sliding_window"] = tiny.config["sliding_window"]
    found: dict[str, Any] = {name: np.array(json.dumps({"config": config, "names": names}))}
    for length, ids in zip(LENGTHS, prompts_of(tiny), strict=True):
        states = model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        found[f"{name}_{length}"] = torch.stack([states[-1], states.double().mean(0), states[0]]).float().numpy()
    return found


@torch.inference_mode()
def scores(name: str) -> list[float]:
    """As Qwen3-Reranker's model card has it: three parts that are encoded apart, and a softmax of two logits."""
    with tempfile.TemporaryDirectory() as directory:
        path = tiny_of(name).write(Path(directory))
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
    before, after = (tokenizer.encode(part, add_special_tokens=False) for part in (_HEAD, _TAIL))
    found = []
    for document in DOCUMENTS:
        body = f"<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {document}"
        ids = before + tokenizer.encode(body, add_special_tokens=False) + after
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        found.append(float(torch.softmax(logits[[NO, YES]].double(), 0)[1]))
    return found


if __name__ == "__main__":
    main()
