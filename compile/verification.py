"""Compare a new artifact's logits with plain NumPy.

`written_weights.py` compares all weights themselves. Logits are compared after one layer of each kind. Repeated layers
make the same calls (`repeated_layers.py`), and over many layers errors would grow until the comparison shows nothing.
The module always computes all layers; layers that are left out get weights of zeros, and add nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.artifact.model_config import Dense, ModelConfig
from radixlm.runtime.errors import VerificationFailed
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.model.model_runner import ModelRunner

from .families.registry import decoder_of
from .ops.program import Program
from .ops.reference_ops import ReferenceOps
from .reference import Weights, draft_after_last, evaluate, weights_of_layers
from .repeated_layers import check_repeated
from .stored_weights import StoredWeights
from .weights.plan import WeightPlan

NUM_TOKENS = 20  # two pages, the second partly filled
NUM_DECODED = 3  # number of these that are decoded one at a time
MOST_TOKENS = 300  # limit, if a window or chunk ends within as many
SEED = 0
_FEW_LAYERS = 4  # a model with at most this many is compared whole
_MOST_LAYERS = 8  # compared at once
_MOST_LAYERS_WITH_EXPERTS = 2  # with a router near a tie, everything after it is a different computation
_MANY_LOGITS = 8192  # for a larger vocabulary, some runs of tokens are compared
_RUNS, _RUN = 64, 64

# Bounds of the difference's root mean square over the logits' deviation, for the median token. Any token may have 5
# times it, unless rounding can change a router's choice (`NEAR_TIE`). If inputs are rounded to 8 bits, a sum that
# rounds to the other side of a tie moves everything after it. Correct artifacts have medians up to 0.13, and seven of
# eight planted bugs from 0.26 (bench/LOG.md). The same holds for KV in codes; with all else in floats Gemma 3 270M has
# 0.03.
_TOLERANCE_FLOAT = 2e-2
_TOLERANCE_CODES = 0.1
_TOLERANCE_ROUNDED = 0.2
_WORST_OVER_MEDIAN = 5


@dataclass(frozen=True)
class Verification:
    """The distance of an artifact from its source, and the compared part of it.

    Attributes:
        median_difference: root mean square of the logits' difference over their deviation, of the median token; if
            layers were compared separately, the largest one.
        worst_difference: the same of the worst token, except tokens for which a router is at a near tie.
        tolerance: limit of `median_difference`.
        num_tokens: number of tokens whose logits were compared.
        layers: layers whose results were compared; the others are of a kind with one of them.
        num_rows: number of rows of weights that were read back and compared by the source's own formula.
    """

    median_difference: float
    worst_difference: float
    tolerance: float
    num_tokens: int
    layers: tuple[int, ...] = ()
    num_rows: int = 0


def check_logits(
    artifact: Artifact,
    plan: WeightPlan,
    weights: StoredWeights,
    program: Program,
    rounded_inputs: Set[str],
    done: Callable[[float], None],
) -> Verification:
    """Compare logits of random tokens, prefilled and then decoded one by one.

    Args:
        plan: offsets of the weights in their file.
        weights: the numbers that the artifact stores.
        program: the kernel calls of the artifact.
        rounded_inputs: names of the matrices whose inputs the kernels round to 8 bits; the reference rounds them too.
        done: called with the finished share.

    Raises:
        VerificationFailed: they differ by more than rounding explains.
    """
    config = artifact.manifest.model
    kinds = _layers_by_kind(config, weights)
    tensors = [[*_tensor_names(config, index)] for index in range(config.num_hidden_layers)]
    check_repeated(program, tensors, kinds)
    groups = _layers_apart(config, kinds)
    of_floats = _TOLERANCE_CODES if artifact.manifest.kv.has_codes else _TOLERANCE_FLOAT
    found = Verification(0.0, 0.0, _TOLERANCE_ROUNDED if rounded_inputs else of_floats, 0)
    for index, layers in enumerate(groups):

        def part_done(share: float, index: int = index) -> None:
            done((index + share) / len(groups))

        check = _LogitsCheck(artifact, plan, weights, rounded_inputs, layers)
        median, worst, num_tokens = check.compare_logits(part_done)
        _check_tolerance(median, worst, num_tokens, found.tolerance, layers, config)
        found = replace(
            found,
            median_difference=max(found.median_difference, median),
            worst_difference=max(found.worst_difference, worst),
            num_tokens=num_tokens,
            layers=tuple(sorted({*found.layers, *layers})),
        )
    return found


def _layers_by_kind(config: ModelConfig, weights: StoredWeights) -> list[list[int]]:
    """Return the layers of each kind; layers of one kind have the same configuration, and tensors stored alike."""
    kinds: dict[object, list[int]] = {}
    for index, layer in enumerate(decoder_of(config).layers):
        names = [name for part in layer.parts() for name in part.tensors]
        kind = config.layers[index], tuple(weights.kinds.get(name) for name in names)
        kinds.setdefault(kind, []).append(index)
    return [*kinds.values()]


def _layers_apart(config: ModelConfig, kinds: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return layers that include every kind, in groups that are computed at once.

    The last layer of a kind is used, because its weights are furthest from the beginning of the file.
    """
    all_layers = tuple(range(config.num_hidden_layers))
    # with weights of zeros, a layer that normalizes sums would make zeros of its rows
    if len(all_layers) <= _FEW_LAYERS or any(layer.norms == "sum" for layer in config.layers):
        return [all_layers]
    found = sorted(kind[-1] for kind in kinds)
    most = _MOST_LAYERS_WITH_EXPERTS if _has_experts(config) else _MOST_LAYERS
    return [_with_shared_kv(config, found[start : start + most]) for start in range(0, len(found), most)]


def _has_experts(config: ModelConfig) -> bool:
    """Return whether any layer has experts."""
    return any(not isinstance(layer.ffn, Dense | None) for layer in config.layers)


def _with_shared_kv(config: ModelConfig, layers: Sequence[int]) -> tuple[int, ...]:
    """Return the layers, and those whose KV they read, in order."""
    mixers = [config.layers[index].mixer for index in layers]
    shared = {index for mixer in mixers if (index := getattr(mixer, "shared_kv", None)) is not None}
    return tuple(sorted({*layers, *shared}))


@dataclass(frozen=True)
class _LogitsCheck:
    """A comparison of logits of random tokens, computed by artifact and reference, after some layers."""

    artifact: Artifact
    plan: WeightPlan
    weights: StoredWeights
    rounded_inputs: Set[str]
    layers: tuple[int, ...]

    def compare_logits(self, done: Callable[[float], None]) -> tuple[float, float, int]:
        """Compare logits with NumPy's. Returns the median and the largest difference, and the number of tokens.

        A token's difference is the root mean square over its logits, divided by the standard deviation of NumPy's. The
        largest leaves out tokens for which a router nearly chose other experts. `done` is called with the finished
        share.
        """
        manifest = self.artifact.manifest
        config = manifest.model
        num_tokens = min(_num_tokens(config), manifest.context_length)
        stops: tuple[int, ...] = (num_tokens,)  # tokens that see those after them are computed together
        if not config.is_bidirectional:
            stops = _step_ends(num_tokens, manifest.module.max_num_logits)
        token_ids = np.random.default_rng(SEED).integers(0, config.vocab_size, num_tokens).astype(np.int32)
        vocabulary = _compared_tokens(config.num_outputs)
        counting = threading.Lock()
        num_read, to_read = 0, sum(1 for index in self.layers for _ in _tensor_names(config, index)) + 4

        def counted(name: str, rows: slice | None = None) -> npt.NDArray[np.float32]:
            nonlocal num_read
            with counting:  # strips are read in several threads
                num_read += rows is None or rows.start == 0
                done(0.8 * min(num_read / to_read, 1))
            return self.weights.float32(name, rows)

        op = ReferenceOps(
            counted,
            token_ids,
            rows=counted,
            quantized=lambda name: name in self.rounded_inputs,
            kv_dtype=manifest.kv.dtype,
            vocabulary=vocabulary,
        )
        expected = evaluate(config, op, self.layers)
        near_ties = op.near_ties.copy()
        if config.mtp is not None:
            drafts = [draft_after_last(config, op)] * (2 if manifest.module.num_frequent else 1)
            expected = np.concatenate([expected, *drafts])
            near_ties = np.append(near_ties, [op.near_ties[-1]] * len(drafts))
        self.weights.source.release()
        with weights_of_layers(self.artifact, self.plan, self.layers) as weights:
            actual = _artifact_logits(self.artifact, weights, token_ids, stops, lambda share: done(0.8 + 0.2 * share))
        if vocabulary is not None:
            actual = np.concatenate([actual[:, tokens] for tokens in vocabulary], axis=-1)
        # a single number has no deviation of its own
        deviation = expected.std(axis=-1) if op.score_deviation is None else op.score_deviation
        difference = np.sqrt(np.mean(np.square(expected - actual), axis=-1)) / deviation
        is_spared = near_ties & np.isfinite(difference)
        return float(np.median(difference)), float(difference[~is_spared].max(initial=0.0)), num_tokens


def _tensor_names(config: ModelConfig, index: int) -> Iterator[str]:
    """Return the names of the tensors of layer `index`."""
    return (name for part in decoder_of(config).layers[index].parts() for name in part.tensors)


def _compared_tokens(size: int) -> list[slice] | None:
    """Return the compared logits: runs of tokens, one in each part of a large vocabulary; None for all."""
    if size <= _MANY_LOGITS:
        return None
    starts = np.random.default_rng(SEED).integers(0, size // _RUNS - _RUN, _RUNS) + np.arange(_RUNS) * (size // _RUNS)
    return [slice(int(start), int(start) + _RUN) for start in starts]


def _num_tokens(config: ModelConfig) -> int:
    """Return a number of tokens that exceeds a window or chunk, if that is within `MOST_TOKENS`."""
    sizes = [size for each in config.attentions for size in (each.window, each.chunk) if size and size < MOST_TOKENS]
    return max(NUM_TOKENS, min(2 * max(sizes) + NUM_DECODED, MOST_TOKENS)) if sizes else NUM_TOKENS


def _step_ends(num_tokens: int, most: int) -> tuple[int, ...]:
    """Return where each step ends: steps compute all but the last few tokens `most` at a time, then one by one."""
    prefilled = num_tokens - NUM_DECODED
    return (*range(most, prefilled, most), *range(prefilled, num_tokens + 1))


def _artifact_logits(
    artifact: Artifact,
    weights: Weights | None,
    token_ids: npt.NDArray[np.int32],
    stops: tuple[int, ...],
    done: Callable[[float], None],
) -> npt.NDArray[np.float32]:
    """Return logits of every token, in steps that end at `stops`, followed by those of an MTP head's draft.

    A head that drafts among frequent tokens follows once more, with its logits of these. `done` gets the finished
    share.
    """
    num_tokens = len(token_ids)
    num_pages = -(-num_tokens // PAGE_SIZE)
    runner = ModelRunner(artifact, num_pages=num_pages, num_state_slots=2, weights=weights)
    pages = np.arange(num_pages, dtype=np.int32)[::-1].copy()  # reversed: a page table is not the identity
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
            **_state_slots(artifact, int(start > 0)),
        )
        logits.append(runner.forward(batch).copy())
        start = stop
        done(len(logits) / len(stops))
    if artifact.manifest.model.mtp is not None:
        # first, because both write to one buffer: a logit that is not written must not be that of the other
        most = runner.num_frequent
        frequent = None if most is None else runner.draft(batch, is_frequent=True).copy()
        logits.append(runner.draft(batch).copy())
        if frequent is not None:
            frequent[:, most:] = logits[-1][:, most:]
            logits.append(frequent)
    runner.close()
    return np.concatenate(logits)


def _state_slots(artifact: Artifact, state_in: int) -> dict[str, npt.NDArray[np.int32]]:
    """Return the slots of a batch of one sequence, which stores its state in the second."""
    slots = {"state_in": np.array([state_in], np.int32), "state_out": np.ones(1, np.int32)}
    return slots if artifact.manifest.model.state_bytes else {}


def _check_tolerance(
    median: float, worst: float, num_tokens: int, tolerance: float, layers: Sequence[int], config: ModelConfig
) -> None:
    """Raise VerificationFailed if differences are too large, or NaN."""
    if not (median <= tolerance and worst <= _WORST_OVER_MEDIAN * tolerance):
        which = "" if len(layers) == config.num_hidden_layers else f" after layers {', '.join(map(str, layers))}"
        raise VerificationFailed(
            f"logits{which} differ from the NumPy evaluation by {median:.3g} of their deviation (the median of "
            f"{num_tokens} tokens; worst {worst:.3g}), at most {tolerance} is rounding; nothing was published. "
            f"Please report the model ({config.architecture})"
        )
