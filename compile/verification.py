"""Run a fresh artifact for a few tokens against a plain NumPy evaluation of the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.artifact.model_config import ModelConfig
from radixlm.runtime.errors import VerificationFailed
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.model.model_runner import ModelRunner

from .families.registry import decoder_of
from .ops.layers import Embedding
from .reference import reference_logits

NUM_TOKENS = 20  # two pages, the second partly filled
NUM_DECODED = 3  # of them, one at a time
MOST_TOKENS = 300  # where a window or chunk ends within so many
SEED = 0
_READS_PER_STEP = 32  # a step of the artifact counts as a 32nd part of the reading, which is most of the time

# Bounds of the difference's root mean square over the logits' deviation: of the median token; any may have 5 times it.
# Where inputs are rounded to 8 bits, a sum that ends on the other side of a tie moves everything after it: correct
# artifacts have medians up to 0.13, and seven of eight planted bugs from 0.26 (bench/LOG.md). Of keys and values in
# codes the same holds; with all else in floats Gemma 3 270M has 0.03.
_TOLERANCE_FLOAT = 2e-2
_TOLERANCE_CODES = 0.1
_TOLERANCE_ROUNDED = 0.2
_WORST_OVER_MEDIAN = 5


class ReadFloat32(Protocol):
    """A tensor by its checkpoint name, or some of its rows: the numbers that the artifact stores."""

    def __call__(self, name: str, rows: slice | None = None) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True)
class Verification:
    """How far the artifact is from the reference: root mean square of the logits' difference over their deviation."""

    median_difference: float
    worst_difference: float
    tolerance: float
    num_tokens: int


def verify_artifact(
    artifact: Artifact,
    weight: ReadFloat32,
    rounded_inputs: Set[str],
    report: Callable[[str, int, int], None],
) -> Verification:
    """Compare logits of random tokens, prefilled and then decoded one by one.

    Args:
        rounded_inputs: names of the matrices whose inputs the kernels round to 8 bits; the reference rounds them too.
        report: called with the stage "verify" and how much of it is done.

    Raises:
        VerificationFailed: they differ by more than rounding explains.
    """
    config = artifact.manifest.model
    num_tokens = min(_num_tokens(config), artifact.manifest.context_length)
    stops = _stops(num_tokens, artifact.manifest.module.max_num_logits)
    token_ids = np.random.default_rng(SEED).integers(0, config.vocab_size, num_tokens).astype(np.int32)
    done, num_read = 0, _num_read(config)  # numbers
    step = max(1, num_read // _READS_PER_STEP)
    total = num_read + len(stops) * step

    def counted(name: str, rows: slice | None = None) -> npt.NDArray[np.float32]:
        nonlocal done
        report("verify", done, total)
        numbers = weight(name, rows)
        done = min(done + numbers.size, num_read)
        return numbers

    def stepped(num_steps: int) -> None:
        report("verify", num_read + num_steps * step, total)

    expected = reference_logits(
        config,
        counted,
        token_ids,
        rows=counted,
        quantized=lambda name: name in rounded_inputs,
        kv_dtype=artifact.manifest.kv.dtype,
    )
    of_floats = _TOLERANCE_CODES if artifact.manifest.kv.has_codes else _TOLERANCE_FLOAT
    tolerance = _TOLERANCE_ROUNDED if rounded_inputs else of_floats
    stepped(0)
    return _compare(expected, _run(artifact, token_ids, stops, stepped), tolerance, config)


def _num_tokens(config: ModelConfig) -> int:
    """So many that tokens see a full window, and a second one or chunk begins, if that is within `MOST_TOKENS`."""
    sizes = [size for each in config.attentions for size in (each.window, each.chunk) if size and size < MOST_TOKENS]
    return max(NUM_TOKENS, min(2 * max(sizes) + NUM_DECODED, MOST_TOKENS)) if sizes else NUM_TOKENS


def _stops(num_tokens: int, most: int) -> tuple[int, ...]:
    """How many tokens are computed after each step: all but the last few, `most` at a time, then one by one."""
    prefilled = num_tokens - NUM_DECODED
    return (*range(most, prefilled, most), *range(prefilled, num_tokens + 1))


def _num_read(config: ModelConfig) -> int:
    """Numbers that the reference reads: all but embeddings, of which it reads few rows, unless they are tied."""
    read = (part.tensors.values() for part in decoder_of(config).parts() if not isinstance(part, Embedding))
    num_tied = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    return sum(math.prod(shape) for shapes in read for shape in shapes) + num_tied


def _run(
    artifact: Artifact, token_ids: npt.NDArray[np.int32], stops: tuple[int, ...], stepped: Callable[[int], None]
) -> npt.NDArray[np.float32]:
    """Logits of every token, in steps that end at `stops`; `stepped` gets how many of them are done."""
    num_tokens = len(token_ids)
    num_pages = -(-num_tokens // PAGE_SIZE)
    runner = ModelRunner(artifact, num_pages=num_pages, num_state_slots=2)
    pages = np.arange(num_pages, dtype=np.int32)[::-1].copy()  # not in order: a page table is not the identity
    start, logits = 0, []
    for stop in stops:
        positions = np.arange(start, stop, dtype=np.int32)
        rows = np.arange(stop - start, dtype=np.int32)
        batch = Batch(
            token_ids=token_ids[start:stop].copy(),
            positions=positions,
            slots=(pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE).astype(np.int32),
            row_of_token=np.zeros(stop - start, np.int32),
            page_table=pages[None],
            kv_lengths=positions + np.int32(1),
            logit_rows=rows,
            **_states(artifact, int(start > 0)),
        )
        logits.append(runner.forward(batch).copy())
        start = stop
        stepped(len(logits))
    runner.close()
    return np.concatenate(logits)


def _states(artifact: Artifact, state_in: int) -> dict[str, npt.NDArray[np.int32]]:
    """The slots of a batch of one sequence, which keeps its state in the second."""
    slots = {"state_in": np.array([state_in], np.int32), "state_out": np.ones(1, np.int32)}
    return slots if artifact.manifest.model.state_bytes else {}


def _compare(
    expected: npt.NDArray[np.floating], actual: npt.NDArray[np.float32], tolerance: float, config: ModelConfig
) -> Verification:
    difference = np.sqrt(np.mean(np.square(expected - actual), axis=-1)) / expected.std(axis=-1)
    median, worst = float(np.median(difference)), float(difference.max())
    if not (median <= tolerance and worst <= _WORST_OVER_MEDIAN * tolerance):  # a NaN is no agreement
        raise VerificationFailed(
            f"logits differ from the NumPy evaluation by {median:.3g} of their deviation (the median of "
            f"{len(actual)} tokens; worst {worst:.3g}), at most {tolerance} is rounding; nothing was published. "
            f"Please report the model ({config.architecture})"
        )
    return Verification(median, worst, tolerance, len(actual))
