"""How far a model is from transformers on SmolLM2's golden, and whether that is further than llama.cpp.

Knows the golden file and arithmetic; NumPy only. The test that runs the model hands over logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np

FILE = Path(__file__).resolve().parent / "smollm2.npz"
_CHUNK = 64  # positions compared at a time: 64 * 49,152 float64 are 25 MB


@dataclass(frozen=True)
class Passage:
    """A text fed as it is, and what is known of each of its positions."""

    ids: list[int]
    hidden: np.ndarray  # float16 [T, hidden]; reference logits = hidden @ embedding.T
    log_probs: np.ndarray  # float32 [T - 1], the reference's, of ids[1:]
    llama_cpp_kl: np.ndarray  # float32 [T], nats
    llama_cpp_agrees: np.ndarray  # bool [T]


@dataclass(frozen=True)
class ChatTurn:
    """All ids that one turn feeds, and the greedy reply to them."""

    prompt: list[int]
    reply: list[int]
    margins: np.ndarray  # float32 [len(reply)], best logit minus second


@dataclass(frozen=True)
class SmolLM2Golden:
    """`smollm2.npz`, as `smollm2.py` made it."""

    passages: list[Passage]
    chats: list[list[ChatTurn]]

    @classmethod
    def load(cls) -> Self:
        with np.load(FILE) as file:
            arrays = dict(file)
        passages: list[Passage] = []
        chats: list[list[ChatTurn]] = []
        while f"passage_{len(passages)}" in arrays:
            i = len(passages)
            known = (arrays[f"{name}_{i}"] for name in ("hidden", "log_probs", "llama_cpp_kl", "llama_cpp_agrees"))
            passages.append(Passage(arrays[f"passage_{i}"].tolist(), *known))
        while f"chat_{len(chats)}_prompt_0" in arrays:
            i = len(chats)
            chats.append(
                [
                    ChatTurn(
                        arrays[f"chat_{i}_prompt_{turn}"].tolist(),
                        arrays[f"chat_{i}_reply_{turn}"].tolist(),
                        arrays[f"chat_{i}_margin_{turn}"],
                    )
                    for turn in range(3)
                ]
            )
        return cls(passages, chats)


@dataclass(frozen=True)
class Comparison:
    """Per position of one or more passages."""

    kl: np.ndarray  # float64 [T], KL(transformers || ours) in nats, over the whole vocabulary
    agrees: np.ndarray  # bool [T], both choose the same next token
    llama_cpp_kl: np.ndarray  # float64 [T]
    llama_cpp_agrees: np.ndarray  # bool [T]

    @classmethod
    def joined(cls, parts: list[Comparison]) -> Self:
        names = ("kl", "agrees", "llama_cpp_kl", "llama_cpp_agrees")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    @cached_property
    def bootstrap(self) -> Bootstrap:
        return bootstrap_ratio(self.kl, self.llama_cpp_kl)


def compare(passage: Passage, logits: np.ndarray, embedding: np.ndarray) -> Comparison:
    """Compare `logits` `[T, vocab]` with the reference; `embedding` is the output matrix `[vocab, hidden]`.

    Raises ValueError if `embedding` is not the matrix that the golden was made with.
    """
    kl, agrees = [], []
    for start in range(0, len(passage.ids), _CHUNK):
        part = slice(start, start + _CHUNK)
        reference = _log_softmax(passage.hidden[part].astype(np.float32) @ embedding.T)
        _check(passage, start, reference)
        ours = _log_softmax(logits[part])
        kl.append((np.exp(reference) * (reference - ours)).sum(axis=-1))
        agrees.append(reference.argmax(axis=-1) == ours.argmax(axis=-1))
    llama_cpp_kl = passage.llama_cpp_kl.astype(np.float64)
    return Comparison(np.concatenate(kl), np.concatenate(agrees), llama_cpp_kl, passage.llama_cpp_agrees)


@dataclass(frozen=True)
class Bootstrap:
    """The ratio of two mean KLs over the same positions, and its spread."""

    ratio: float  # mean(ours) / mean(theirs)
    low: float  # 2.5th percentile over resamples
    high: float  # 97.5th


def bootstrap_ratio(
    ours: np.ndarray, theirs: np.ndarray, *, block: int = 16, num_resamples: int = 4000, seed: int = 0
) -> Bootstrap:
    """Resample positions in pairs, `block` neighbours together (errors of neighbours in a text go together).

    Blocks do not wrap around; with 1,000 positions there are 62 of 16.
    """
    num_blocks = len(ours) // block
    sums = [kl[: num_blocks * block].reshape(num_blocks, block).sum(axis=1) for kl in (ours, theirs)]
    chosen = np.random.default_rng(seed).integers(num_blocks, size=(num_resamples, num_blocks))
    ratios = sums[0][chosen].sum(axis=1) / sums[1][chosen].sum(axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Bootstrap(float(ours.mean() / theirs.mean()), float(low), float(high))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _check(passage: Passage, start: int, reference: np.ndarray) -> None:
    next_ids = np.array(passage.ids[start + 1 : start + 1 + len(reference)])
    found = reference[np.arange(len(next_ids)), next_ids]
    off = np.abs(found - passage.log_probs[start : start + len(next_ids)]).max(initial=0.0)
    if off > 1e-3:
        raise ValueError(f"log-probabilities are {off:.2g} off the golden's: this is not its output matrix")
