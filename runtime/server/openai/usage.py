"""The tokens of a request, however many prompts and choices it has, as OpenAI counts them.

Knows finished completions, not endpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from ...cache.prefix_match import MatchKind
from ...engine.completion import Completion
from .replies import PromptTokensDetails, UsageReply, WhyNotMoreReply

_WEAKER_AND_WEAKER: tuple[str, ...] = get_args(MatchKind)


def usage_of(completions: Sequence[Completion], num_choices: int = 1, *, tells_cached_text: bool) -> UsageReply:
    """The usage of all `completions`: `num_choices` of the first prompt, then as many of the next.

    A prompt counts once, as at OpenAI's. Of its choices, the one that found least cached computed what the others
    reused: its figures are the prompt's. `cache_match` is the weakest kind that any prompt used, and `why_not_more`
    the first prompt's that has one. Where prefixes were loaded in part, the labels are the worst prompt's.
    """
    groups = [completions[start : start + num_choices] for start in range(0, len(completions), num_choices)]
    prompts = [min(group, key=lambda completion: completion.usage.cached_tokens) for group in groups]
    prompt_tokens = sum(prompt.usage.prompt_tokens for prompt in prompts)
    completion_tokens = sum(completion.usage.completion_tokens for completion in completions)
    return UsageReply(
        prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, _details(prompts, tells_cached_text)
    )


def _details(prompts: Sequence[Completion], tells_cached_text: bool) -> PromptTokensDetails:
    by_kind: Counter[str] = Counter()
    num_from_disk = 0
    for prompt in prompts:
        by_kind.update(prompt.usage.tokens_by_kind)
        num_from_disk += sum(prompt.usage.disk_tokens_by_kind.values())
    by_tier = {"memory": by_kind.total() - num_from_disk, "disk": num_from_disk}
    whys = (
        WhyNotMoreReply.told(prompt.cache_match.why_not_more, tells_cached_text=tells_cached_text) for prompt in prompts
    )
    kinds = [prompt.cache_match.kind for prompt in prompts if prompt.cache_match.kind is not None]
    details = PromptTokensDetails(
        cached_tokens=sum(prompt.usage.cached_tokens for prompt in prompts),
        cached_tokens_by_kind=dict(by_kind),
        cached_tokens_by_tier={tier: count for tier, count in by_tier.items() if count},
        cache_match=max(kinds, key=_WEAKER_AND_WEAKER.index, default=None),
        why_not_more=next((why for why in whys if why is not None), None),
    )
    prunings = [prompt.usage.pruning for prompt in prompts if prompt.usage.pruning is not None]
    if prunings:
        details.kv_loaded = round(min(pruning.loaded for pruning in prunings), 4)
        details.kv_dropped_mass = round(max(pruning.dropped_mass for pruning in prunings), 4)
    return details
