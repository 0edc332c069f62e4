"""Make `tiny/*.npz`: what transformers computes for the tiny models of `tiny_models.py`.

    python -m tests.goldens.make_tiny

Run by `make goldens`; needs torch, transformers and xllamacpp, which no test does. Each file holds
    digest                        of the weights
    llama_cpp                     largest difference from llama.cpp's logits of the same checkpoint as GGUF
    prompt_0 .. prompt_4          token ids
    rows_0 .. rows_4              positions of which the logits are kept
    logits_0 .. logits_4          float32 [len(rows), vocab], CPU, float32, eager attention
    turn_0 .. turn_2, reply_0 ..  a chat in ids: what the user adds, what greedy decoding answers
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from .make_families import witness
from .tiny_models import TINY_MODELS, TinyModel
from .tiny_outputs import FOLDER

REPLY_LENGTH = 16
SMALLEST_MARGIN = 0.006  # of the logits' standard deviation: else greedy ids would hang on rounding


def main() -> None:
    torch.set_num_threads(1)
    for tiny in TINY_MODELS.values():
        with tempfile.TemporaryDirectory() as directory:
            tiny.write(Path(directory))
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        second, problems = witness(tiny, [logits(model, ids) for ids in tiny.prompts()])
        if problems:
            raise SystemExit(f"{tiny.name}: {problems}")
        path = FOLDER / f"{tiny.name}.npz"
        found = {"digest": tiny.digest(), "llama_cpp": np.float32(second)}
        np.savez_compressed(path, **found, **prefill(tiny, model), **chat(tiny, model))
        print(f"{tiny.name}: {path.stat().st_size:,} bytes, llama.cpp {second:.1e}")


def prefill(tiny: TinyModel, model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Logits of each prompt: all positions of the short ones, a few of the others."""
    arrays: dict[str, np.ndarray] = {}
    for i, ids in enumerate(tiny.prompts()):
        rows = np.arange(len(ids)) if len(ids) < 20 else np.linspace(0, len(ids) - 1, 9, dtype=np.int64)
        arrays |= {f"prompt_{i}": np.array(ids, np.int32), f"rows_{i}": rows.astype(np.int32)}
        arrays[f"logits_{i}"] = logits(model, ids)[rows]
    return arrays


def chat(tiny: TinyModel, model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Greedy replies of a fixed length, each turn on top of all before it."""
    arrays: dict[str, np.ndarray] = {}
    history: list[int] = []
    for i, turn in enumerate(tiny.user_turns()):
        history += turn
        for _ in range(REPLY_LENGTH):
            history.append(greedy(logits(model, history)[-1]))
        arrays |= {
            f"turn_{i}": np.array(turn, np.int32),
            f"reply_{i}": np.array(history[-REPLY_LENGTH:], np.int32),
        }
    return arrays


@torch.inference_mode()
def logits(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    return model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()


def greedy(row: np.ndarray) -> int:
    best, second = np.sort(row)[[-1, -2]]
    if best - second < SMALLEST_MARGIN * row.std():
        raise SystemExit(
            f"the two best logits are {best} and {second}: choose another seed, greedy ids hang on rounding"
        )
    return int(row.argmax())


if __name__ == "__main__":
    main()
