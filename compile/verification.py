"""Run a fresh artifact for a few tokens against a plain NumPy evaluation of the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.batch import Batch
from radixlm.runtime.errors import VerificationFailed
from radixlm.runtime.manifest import PAGE_SIZE, ModelConfig
from radixlm.runtime.model_runner import ModelRunner

from .quantization import Weight
from .reference import reference_logits

NUM_TOKENS = 20  # two pages, the second partly filled
NUM_DECODED = 3  # of them, one at a time
SEED = 0

# Root mean square of the difference, over the logits' standard deviation.
_TOLERANCE_FLOAT = 2e-2
_TOLERANCE_QUANTIZED = 0.25

GetWeight = Callable[[str], Weight]


@dataclass(frozen=True)
class Verification:
    """How far the artifact is from the reference: root mean square of the logits' difference over their deviation."""

    relative_difference: float
    tolerance: float
    num_tokens: int


def verify_artifact(artifact: Artifact, weight: GetWeight, report: Callable[[str, int, int], None]) -> Verification:
    """Compare logits of random tokens, prefilled and then decoded one by one.

    Args:
        weight: a tensor by its checkpoint name, as the artifact stores it.
        report: called with the stage "verify" and how much of it is done.

    Raises:
        VerificationFailed: they differ by more than rounding explains.
    """
    config = artifact.manifest.model
    num_tokens = min(NUM_TOKENS, artifact.manifest.context_length)
    token_ids = np.random.default_rng(SEED).integers(0, config.vocab_size, num_tokens).astype(np.int32)
    quantized: dict[str, bool] = {}
    read = 0

    def dequantized(name: str) -> npt.NDArray[np.float32]:
        nonlocal read
        read += 1
        report("verify", min(read, config.num_hidden_layers * 9), config.num_hidden_layers * 9 + 1)
        stored = weight(name)
        quantized[name] = stored.kind.is_quantized
        return stored.dequantize()

    expected = reference_logits(
        config,
        dequantized,
        token_ids,
        quantized=lambda name: _is_quantized(name, weight, quantized),
        kv_dtype=artifact.manifest.kv.dtype,
    )
    actual = _run(artifact, token_ids)
    report("verify", 1, 1)
    return _compare(expected, actual, any(quantized.values()), config)


def _is_quantized(name: str, weight: GetWeight, known: dict[str, bool]) -> bool:
    if name not in known:
        known[name] = weight(name).kind.is_quantized
    return known[name]


def _run(artifact: Artifact, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Logits of every token: all but the last few at once, those one by one."""
    num_tokens = len(token_ids)
    num_pages = -(-num_tokens // PAGE_SIZE)
    runner = ModelRunner(artifact, num_pages=num_pages)
    pages = np.arange(num_pages, dtype=np.int32)[::-1].copy()  # not in order: a page table is not the identity
    start, logits = 0, []
    for stop in (num_tokens - NUM_DECODED, *range(num_tokens - NUM_DECODED + 1, num_tokens + 1)):
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
        )
        logits.append(runner.forward(batch).copy())
        start = stop
    runner.close()
    return np.concatenate(logits)


def _compare(
    expected: npt.NDArray[np.floating], actual: npt.NDArray[np.float32], quantized: bool, config: ModelConfig
) -> Verification:
    tolerance = _TOLERANCE_QUANTIZED if quantized else _TOLERANCE_FLOAT
    difference = np.sqrt(np.mean(np.square(expected - actual), axis=-1)) / expected.std(axis=-1)
    worst = float(difference.max())
    if not worst <= tolerance:  # a NaN is no agreement
        raise VerificationFailed(
            f"logits differ from the NumPy evaluation by {worst:.3g} of their deviation (token {int(difference.argmax())}), "
            f"at most {tolerance} is rounding; nothing was published. Please report the model ({config.architecture})"
        )
    return Verification(worst, tolerance, len(actual))
