"""Make `real_NAME.npz`: what transformers computes for real models' dequantized GGUF, and how far llama.cpp is from it.

    python -m tests.goldens.real FILE.gguf ...

Run by `make goldens` with the files of `tests/real_models.py`; needs torch, transformers, accelerate, gguf and
xllamacpp, which no test does. `RealPrompt` says what a golden holds. transformers reads the GGUF file itself, and
computes in float32 with eager attention. llama.cpp runs with its defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from .llama_cpp_logits import LlamaCppLogits
from .real_kl import HERE, NUM_DRAWN, NUM_LIKELY, estimated_kl, file_of

CONTEXT = 2048
PASSAGES = (HERE / "smollm2_passages.txt").read_text("utf-8").split("=====\n")
TECHNICAL = (HERE.parents[1] / "bench" / "partial" / "text.txt").read_text("utf-8")
CODE = (HERE / "real_code.txt").read_text("utf-8")


@dataclass(frozen=True)
class Text:
    """The first `length` tokens of a text; all positions from `first` on are compared."""

    text: str
    length: int
    first: int


MODELS = {  # by file: what the golden is called, and its texts
    "gemma-3-270m-q4_k_m.gguf": (
        "gemma3",  # its window of 512 leaves tokens out at all positions that are compared but for the first twelve
        (Text("\n".join(PASSAGES[:3]) + TECHNICAL, length=1500, first=500),),
    ),
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": (
        "qwen2",
        (Text(CODE, length=600, first=0), Text("\n".join(PASSAGES[:2]), length=400, first=0)),
    ),
}


def main(paths: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for path in map(Path, paths):
        make(*MODELS[path.name], path)


def make(name: str, texts: tuple[Text, ...], path: Path) -> None:
    reference = Reference(path)
    arrays: dict[str, np.ndarray] = {}
    with LlamaCppLogits(str(path), CONTEXT) as llama_cpp:
        for i, text in enumerate(texts):
            ids = llama_cpp.encode(text.text)[: text.length]
            assert len(ids) == text.length, f"the text has {len(ids)} tokens"
            found, estimate = compare(reference.logits(ids, text.first), llama_cpp.logits(ids, text.first))
            kl, agrees = found["llama_cpp_kl"], found["llama_cpp_agrees"].mean()
            print(f"{name}, text {i}: llama.cpp: KL {kl.mean():.5f} (estimated {estimate.mean():.5f}), agrees {agrees}")
            arrays |= {f"{key}_{i}": array for key, array in {"ids": np.array(ids, np.int32), **found}.items()}
    np.savez_compressed(file_of(name), **arrays)
    print(f"{file_of(name).stat().st_size:,} bytes")


class Reference:
    """transformers with a GGUF file's weights in float32."""

    def __init__(self, path: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        assert all(parameter.dtype == torch.float32 for parameter in self.model.parameters())

    @torch.inference_mode()
    def logits(self, ids: list[int], first: int) -> Iterator[torch.Tensor]:
        """Logits of each position from `first` on: float32 `[vocab]`."""
        hidden = self.model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, first:]
        for rows in hidden.split(50):  # logits of all positions at once are more than a gigabyte
            yield from self.model.lm_head(rows)


def compare(
    references: Iterator[torch.Tensor], others: Iterator[np.ndarray]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The arrays of a `RealPrompt`, but for its ids; and what `estimated_kl` makes of llama.cpp's distance."""
    random = np.random.default_rng(0)
    pairs = zip(references, others, strict=True)
    rows = [_compare(log_softmax(one.numpy()), log_softmax(other), random) for one, other in pairs]
    likely, log_probs, kl, agrees, found = (np.array(column) for column in zip(*rows, strict=True))
    rounded = log_probs.astype(np.float16)
    arrays = {
        "likely": likely.astype(np.int32),
        "log_probs": rounded,
        "llama_cpp_kl": kl.astype(np.float32),
        "llama_cpp_agrees": agrees,
    }
    return arrays, estimated_kl(rounded.astype(np.float64), found)


def _compare(ours: np.ndarray, theirs: np.ndarray, random: np.random.Generator) -> tuple[object, ...]:
    """What is kept of a position, how far llama.cpp is off, and its log-probabilities of what is kept."""
    probs = np.exp(ours)
    kl = float((probs * (ours - theirs)).sum())
    best = np.argpartition(-ours, NUM_LIKELY)[:NUM_LIKELY]
    best = best[np.argsort(-ours[best], kind="stable")]
    probs[best] = 0.0
    ids = np.concatenate([best, random.choice(len(probs), NUM_DRAWN, p=probs / probs.sum())])
    return ids, ours[ids], kl, best[0] == theirs.argmax(), theirs[ids]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Float64, of one position."""
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


if __name__ == "__main__":
    main(sys.argv[1:])
