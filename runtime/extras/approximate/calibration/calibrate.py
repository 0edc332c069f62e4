"""Find the KV head whose keys best predict where a query looks, and how much attention can be dropped.

Facts are put into prefixes and asked for, together with the continuation of the text, with all rows and with a share of
them. The head is the one with which a quarter of the rows loses least. The bound is chosen so that facts are still
found: at the least measured share that keeps `KEPT_FACTS` of them, no question exceeds it.

If a model has many KV heads, those that lose most are dropped after each case (successive halving). Knows
a runner that scores and token ids, not files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ....artifact import Artifact
from ....artifact.manifest import PAGE_SIZE, Manifest
from ....errors import InvalidParameter
from ....model.batch import Float32Array
from ..attention_scores import ScoringRunner
from ..packed_keys import Dims, PackedKeys, kept_dims
from ..row_selection import Scores, Tokens, dropped_attention, num_rows, probe, with_probed
from .calibration import BudgetLoss, Calibration
from .measured_prefix import Case, MeasuredModel, MeasuredPrefix, Question

BUDGETS: Final = (0.05, 0.1, 0.25, 0.5)
HEAD_BUDGET: Final = 0.25  # at which heads are compared
KEPT_FACTS: Final = 0.9  # of the facts found with all rows
MIN_FACTS: Final = 3  # a model that finds fewer is judged by KL alone
MAX_KL: Final = 0.5  # nats a token
MARGIN: Final = 1.1  # over the largest estimate: other prompts spread their attention a little more
NUM_FINALISTS: Final = 4  # heads that get all questions
_NUM_COUNTED: Final = 2  # questions of a case that count: the fact, and one continuation


@dataclass(frozen=True)
class Loss:
    """The loss of one question with a share of the rows."""

    kl: float
    is_found: bool  # the fact is the model's most likely continuation at each token
    is_found_whole: bool  # with all rows
    dropped: float  # estimated by the probe


def pages_needed(cases: Sequence[Case]) -> int:
    """Return the number of pages that a runner's pool needs."""
    return 2 * _region(cases)


def calibrate(
    artifact: Artifact,
    runner: ScoringRunner,
    cases: Sequence[Case],
    *,
    progress: Callable[[float], None] = lambda done: None,
) -> Calibration:
    """Measure what a model loses by approximate KV loading, and choose the KV head and the bound that it is used with.

    Args:
        runner: with `pages_needed(cases)` pages.
        progress: called with the completed share.

    Raises:
        InvalidParameter: the model cannot use a part of its rows.
    """
    manifest = checked(artifact.manifest)
    model = measured_model(artifact, runner, cases)
    dims = kept_dims(manifest)
    head_kl = _compare_heads(model, cases, dims, lambda done: progress(done / 2))
    probe_head = min(head_kl, key=lambda head: head_kl[head])
    losses: dict[float, list[Loss]] = {budget: [] for budget in BUDGETS}
    for number, case in enumerate(cases):
        for asked in questions_of(model, case):
            for budget in BUDGETS:
                losses[budget].append(asked.loss(budget, probe_head, dims))
        progress((1 + (number + 1) / len(cases)) / 2)
    rows = [_budget_loss(budget, some) for budget, some in losses.items()]
    num_facts = sum(loss.is_found_whole for loss in losses[BUDGETS[0]])
    kept = [row for row in rows if row.kl <= MAX_KL and _keeps_facts(row, num_facts)]
    least = min((row.budget for row in kept), default=1.0)
    if kept:
        bound = min(1.0, MARGIN * min(kept, key=lambda row: row.budget).dropped)
    else:  # no share is enough: nearly all questions get all rows
        bound = min(loss.dropped for loss in losses[BUDGETS[-1]])
    return Calibration(
        1,
        manifest.digest,
        probe_head,
        float(np.clip(bound, 1e-6, 1.0)),
        least,
        num_facts,
        {str(head): kl for head, kl in sorted(head_kl.items())},
        rows,
    )


def measured_model(artifact: Artifact, runner: ScoringRunner, cases: Sequence[Case]) -> MeasuredModel:
    """Return the artifact's runner as a model to measure, with enough pages for these cases."""
    manifest = artifact.manifest
    group_size = manifest.model.num_attention_heads // manifest.kv.num_kv_heads
    return MeasuredModel(runner, manifest.kv, group_size, manifest.module.max_num_tokens, _region(cases))


def checked(manifest: Manifest) -> Manifest:
    """Return the manifest if its model can use a part of its rows.

    Raises:
        InvalidParameter: it cannot.
    """
    if (why := manifest.model.why_not_partial) is not None:
        raise InvalidParameter(f"{manifest.name} serves no part of a prefix, because {why}: nothing to calibrate")
    return manifest


def _compare_heads(
    model: MeasuredModel, cases: Sequence[Case], dims: Dims, progress: Callable[[float], None]
) -> dict[int, float]:
    """Return the mean loss when rows are chosen by the keys of one KV head, in nats per token, by head.

    Each question is answered with `HEAD_BUDGET` of the rows. After each case the worse half of the heads is dropped,
    down to `NUM_FINALISTS`. Those that are left have answered all questions, and are returned.
    """
    found: dict[int, list[float]] = {head: [] for head in range(model.layout.num_kv_heads)}
    for number, case in enumerate(cases):
        for asked in questions_of(model, case):
            for head, some in found.items():
                some.append(asked.loss(HEAD_BUDGET, head, dims).kl)
        if len(found) > NUM_FINALISTS:
            best = sorted(found, key=lambda head: sum(found[head]))[: max(NUM_FINALISTS, len(found) // 2)]
            found = {head: found[head] for head in sorted(best)}
        progress((number + 1) / len(cases))
    return {head: float(np.mean(some)) for head, some in found.items()}


@dataclass
class MeasuredQuestion:
    """A question about a prefix, and the result with all rows."""

    prefix: MeasuredPrefix
    question: Question
    is_fact: bool
    log_probs: Scores  # with all rows
    order: Tokens  # storage order of rows, from the attention of the other questions

    def loss(self, budget: float, head: int, dims: Dims) -> Loss:
        """Return the loss with a share of the rows, chosen as in serving: by order, and by the keys of a head."""
        prefix, question = self.prefix, self.question
        count, num_logits = num_rows(prefix.num_tokens, budget), len(question.continuation)
        chosen = prefix.stored(self.order, count)
        prefix.logits_of_rows(chosen, question.ids, 0)
        keys = PackedKeys.of(prefix.rows.keys_of(head), dims)
        seen = probe(prefix.queries(len(question.ids), head), keys, chosen[:, head])
        chosen = with_probed(chosen, seen.largest, count)
        partial = _log_probs(prefix.logits_of_rows(chosen, question.fed, num_logits))
        whole, target = self.log_probs, np.array(question.continuation)
        is_found, is_found_whole = (bool((row.argmax(axis=-1) == target).all()) for row in (partial, whole))
        return Loss(
            kl=float((np.exp(whole) * (whole - partial)).sum(axis=-1).mean()),
            is_found=self.is_fact and is_found,
            is_found_whole=self.is_fact and is_found_whole,
            dropped=dropped_attention(seen.mean, chosen[:, head]),
        )


def questions_of(model: MeasuredModel, case: Case) -> Iterator[MeasuredQuestion]:
    """Yield the questions of a case whose loss is measured. All others only show where earlier prompts looked."""
    prefix = MeasuredPrefix(model, case.prefix)
    runs = [prefix.whole(question.fed, len(question.continuation)) for question in case.questions]
    attention = np.stack([scores for _, scores in runs])
    for number, question in enumerate(case.questions[:_NUM_COUNTED]):  # the fact is the first
        history = (attention.sum(axis=0) - attention[number]) / (len(runs) - 1)
        yield MeasuredQuestion(prefix, question, number == 0, _log_probs(runs[number][0]), prefix.order(history))


def _budget_loss(budget: float, losses: Sequence[Loss]) -> BudgetLoss:
    """Summarize the losses at one budget. A fact counts only if it is found with all rows."""
    num_found = sum(loss.is_found and loss.is_found_whole for loss in losses)
    kl = float(np.mean([loss.kl for loss in losses]))
    return BudgetLoss(budget, kl, num_found, max(loss.dropped for loss in losses))


def _keeps_facts(row: BudgetLoss, num_facts: int) -> bool:
    return num_facts < MIN_FACTS or row.num_found >= KEPT_FACTS * num_facts


def _log_probs(logits: Float32Array) -> Scores:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _region(cases: Sequence[Case]) -> int:
    """Return the pages of the longest prefix with a question."""
    longest = max(len(case.prefix) + max(len(question.fed) for question in case.questions) for case in cases)
    return -(-longest // PAGE_SIZE)
