"""What a caller asks of one request beside its prompt and its sampling parameters: one value on its whole way.

Knows ranges, not engines: what an engine uses where a request asks for nothing is the engine's to say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypedDict, Unpack, get_args

from ..cache.prefix_match import MatchPolicy
from ..chat.grammar import Grammar
from ..chat.token_constraint import ConstraintSource
from ..errors import InvalidParameter

MAX_ID_LENGTH = 256  # characters of a caller's own name of a request


class OptionKeywords(TypedDict, total=False):
    """The fields of `RequestOptions`, for callers who write them as keywords."""

    namespace: bytes
    cache_match: MatchPolicy | None
    kv_budget: float | None
    constraint: Grammar | ConstraintSource | None
    request_id: str | None
    with_progress: bool


@dataclass(frozen=True)
class RequestOptions:
    """Options of one request; None leaves a choice to the engine.

    >>> RequestOptions(cache_match="off").changed(kv_budget=0.5)
    RequestOptions(namespace=b'', cache_match='off', kv_budget=0.5, constraint=None, request_id=None, \
with_progress=False)

    Attributes:
        namespace: separates clients; cached prefixes are never shared between two namespaces.
        cache_match: how cached prefixes may be found.
        kv_budget: the share of a stored prefix's keys and values that is enough, above 0 and at most 1.
        constraint: what the reply keeps to: a grammar, which is compiled for this request, or what
            `Engine.grammars.compile` made of one, for several requests.
        request_id: the caller's own name of the request, of 1 to 256 characters. The stream, the completion and the log
            repeat it. Several requests may have the same name.
        with_progress: the stream has deltas without text that say when the request starts, and how far its prompt is.

    Raises:
        InvalidParameter: a value is outside its range.
    """

    namespace: bytes = b""
    cache_match: MatchPolicy | None = None
    kv_budget: float | None = None
    constraint: Grammar | ConstraintSource | None = None
    request_id: str | None = None
    with_progress: bool = False

    def __post_init__(self) -> None:
        if self.cache_match is not None:
            checked_match(self.cache_match)
        if self.kv_budget is not None:
            checked_budget(self.kv_budget)
        if self.request_id is None:
            return
        if not isinstance(self.request_id, str) or not 0 < len(self.request_id) <= MAX_ID_LENGTH:
            raise InvalidParameter(
                f"request_id is {self.request_id!r:.60}; it must be a string of 1 to {MAX_ID_LENGTH} characters",
                param="request_id",
            )

    def changed(self, **keywords: Unpack[OptionKeywords]) -> RequestOptions:
        """The same options but for those given here."""
        return replace(self, **keywords) if keywords else self


NO_OPTIONS = RequestOptions()


def checked_budget(kv_budget: float) -> float:
    """`kv_budget`, if it is a share.

    Raises:
        InvalidParameter: it is not above 0 and at most 1.
    """
    if not 0 < kv_budget <= 1:  # which NaN is not
        raise InvalidParameter(f"kv_budget is {kv_budget}; it must be above 0 and at most 1", param="kv_budget")
    return kv_budget


def checked_match(match: MatchPolicy) -> MatchPolicy:
    """`match`, if there is such a policy.

    Raises:
        InvalidParameter: there is none.
    """
    if match not in get_args(MatchPolicy):
        raise InvalidParameter(f"match is {match!r}; use one of {', '.join(get_args(MatchPolicy))}")
    return match
