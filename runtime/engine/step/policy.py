"""The limits that steps are planned within.

Values only.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..waiting_request import AdmissionPolicy


@dataclass(frozen=True)
class SchedulerPolicy:
    """Limits of a step, and how cached prefixes weigh against waiting.

    A waiting request's turn comes by `cached tokens + ageing_tokens_per_s * seconds waited`: a cached prefix
    lets it overtake others, for a bounded time. Only the `num_candidates` oldest are looked at, so that a
    long queue costs nothing.

    Parts of prompts take about `prompts_s` seconds of a step at most while others wait or stream; the oldest has half
    of that, and others share the rest, the shortest first. Prompts that end in the step have a quarter of a second.
    None: tokens alone limit a step.

    A step has `max_num_logits` rows of logits, at least one for each sequence. A prompt whose logprobs are asked for
    takes one for each token, and so is computed in shorter parts.

    Where it `speculates`, steps without prompts check guesses of what replies go on with, as many as pay: of a draft
    model if there is one, and where it `looks_up`, of what was said before.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_logits: int = 64
    ageing_tokens_per_s: float = 256.0
    num_candidates: int = 32
    admission: AdmissionPolicy = "optimistic"
    prompts_s: float | None = None
    speculates: bool = False
    looks_up: bool = True
