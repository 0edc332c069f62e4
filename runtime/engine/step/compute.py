"""Compute a step that was planned: the forward, then a token of each request that samples, or several of a draft.

Knows a plan's requests, the model and its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from ...cache.kv_transaction import KVTransaction
from ...errors import EngineError
from ...model.batch import Float32Array, Forward, TopLogits, make_batch
from .plan import ScheduledRequest
from .sampler import Sampled, logprob_of, sample
from .verify import Verified, verify


def compute(
    forward: Forward,
    step: KVTransaction,
    scheduled: Sequence[ScheduledRequest],
    *,
    vocab_size: int,
    clock: Callable[[], float],
) -> list[tuple[ScheduledRequest, Sampled | Verified]]:
    """Run the model over all of `scheduled`, sample one of `vocab_size` ids for those that sample, hold drafts against
    what it says, and read logprobs of prompts. None for a request of which some logits are not finite, whether it
    samples or not.

    Raises:
        EngineError: the model returned logits of another shape.
    """
    if not scheduled:
        return []
    if step.copies:
        forward.copy_rows(step.copies)
    num_logits = [item.num_logits for item in scheduled]
    num_rows = sum(num_logits)
    logits = forward.forward(make_batch([item.reservation for item in scheduled], num_logits))
    if logits.shape[0] != num_rows or logits.shape[1] < vocab_size:
        raise EngineError(
            f"the model returned logits of shape {logits.shape}, not {(num_rows, vocab_size)}; compile the model again"
        )
    if not num_rows:
        return []
    # a padded embedding has rows that are no token: they are never sampled
    logits, top = logits[:, :vocab_size], forward.top_logits(num_rows, vocab_size)
    rows = [range(stop - number, stop) for number, stop in zip(num_logits, accumulate(num_logits), strict=True)]
    outcomes: dict[str, Sampled | Verified] = {}
    for item, own in zip(scheduled, rows, strict=True):
        if item.draft.token_ids:
            outcomes[item.request.request_id] = _verify(item, logits, top, own.start, clock())
    plain = [
        (item, own[-1]) for item, own in zip(scheduled, rows, strict=True) if item.samples and not item.draft.token_ids
    ]
    sampled = sample(logits, top, [item.request.reply.sampler for item, _ in plain], [row for _, row in plain])
    outcomes |= {item.request.request_id: token for (item, _), token in zip(plain, sampled, strict=True)}
    for item, own in zip(scheduled, rows, strict=True):
        if not _read_prompt(item, logits, top, own[: len(own) - item.samples]):
            outcomes[item.request.request_id] = None
    return [(item, outcomes[id]) for item in scheduled if (id := item.request.request_id) in outcomes]


def _verify(item: ScheduledRequest, logits: Float32Array, top: TopLogits, start: int, now: float) -> Verified:
    """Hold a request's draft against the logits from row `start` on."""

    def sampled(number: int) -> Sampled:
        return sample(logits, top, [item.request.reply.sampler], [start + number])[0]

    return verify(item.request, item.draft.token_ids, sampled, now)


def _read_prompt(item: ScheduledRequest, logits: Float32Array, top: TopLogits, rows: range) -> bool:
    """Read the rows that say what comes next in a prompt, if its logprobs are asked for; False: some are not finite."""
    asked = item.request.prompt_logprobs
    if asked is None or not rows:
        return True
    if not top.is_finite[rows.start : rows.stop].all():
        return False
    for row in rows:
        asked.append(logprob_of(logits[row], top.values[row], top.token_ids[row], asked.next_id, asked.num_top))
    return True
