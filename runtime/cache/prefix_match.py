"""Match a prompt with the prefix cache: how much is cached, by which kind of match, and why not more.

Searches the tree by ids, and by text if that finds more; changes nothing. Knows neither sequences nor requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from radixlm.tokenizer_fix import SpelledPrompt

from ..errors import EmptyPrompt
from .found_run import FoundRun
from .radix_node import TOKEN_BYTES, encode_key
from .radix_tree import RadixTree
from .reply_alias import ReplyAliases
from .text_walk import ALIAS, EXACT, TEXT, TextWalk
from .why_not_more import MAX_BEFORE, MAX_IDS_COMPARED, MAX_IDS_SHOWN, MatchEnd, MatchKind, WhyKind, WhyNotMore


@dataclass(frozen=True)
class PartialPage:
    """A page whose first `num_rows` rows are reused by copying them; a reservation says when."""

    page_id: int
    num_rows: int


@dataclass(frozen=True)
class PrefixMatch:
    """The cached prefix of a prompt. Holds no page: it is valid until the cache changes.

    `pages` are the full pages that are shared. `partial` is the page after them, whose rows are copied.
    `num_tokens == PAGE_SIZE * len(pages) + partial.num_rows == sum(tokens_by_kind.values())`.
    """

    prompt_ids: tuple[int, ...]
    num_match: int
    namespace: bytes | None  # None: nothing is shared
    tokens_by_kind: Mapping[MatchKind, int]
    pages: tuple[int, ...]
    partial: PartialPage | None
    why_not_more: WhyNotMore
    version: int  # of the tree in which it was found
    key: bytes = field(repr=False)  # the tokens that can match, as a key: to search for them again

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens that need no forward."""
        return sum(self.tokens_by_kind.values())


def match_prompt(
    tree: RadixTree,
    aliases: ReplyAliases,
    prompt_ids: Sequence[int],
    *,
    num_match: int | None = None,
    namespace: bytes | None = b"",
    num_known: int = 0,
    spelled: Callable[[], SpelledPrompt] | None = None,
) -> PrefixMatch:
    """Return the longest cached prefix of a prompt; see `PrefixCache.match`.

    Raises:
        EmptyPrompt: there are no tokens.
    """
    prompt = tuple(prompt_ids)
    if not prompt:
        raise EmptyPrompt("the prompt has 0 tokens; send at least one")
    num_match = len(prompt) if num_match is None else num_match
    limit = min(num_match, len(prompt) - 1)
    key = encode_key(prompt[:limit])
    found = tree.find_resumable(namespace, key)
    kinds = bytes(found.num_tokens)
    root = tree.root(namespace)
    if namespace is not None and spelled is not None and root is not None and found.num_with_kv < limit:
        spelled_prompt = spelled()
        matched = TextWalk(root, spelled_prompt, num_match, partial(aliases.find, namespace)).run()
        if any(matched.kinds) and matched.reach >= spelled_prompt.starts[found.num_with_kv]:
            num_match += len(matched.ids) - len(prompt)
            prompt, kinds = matched.ids, matched.kinds
            key = encode_key(prompt[: min(num_match, len(prompt) - 1)])
            found = tree.find_resumable(namespace, key)
    by_kind = _tokens_by_kind(kinds, found.num_tokens, num_known)
    return _make_match(tree, found, prompt, num_match, namespace, by_kind, key)


def match_again(tree: RadixTree, match: PrefixMatch) -> PrefixMatch:
    """Match the ids of an earlier match in the tree as it is now, by ids alone.

    A waiting request is matched in each step. Encoding its prompt takes a hundred times as long as comparing it.
    """
    found = tree.find_resumable(match.namespace, match.key)
    by_kind: dict[MatchKind, int] = {"exact": found.num_tokens} if found.num_tokens else {}
    return _make_match(tree, found, match.prompt_ids, match.num_match, match.namespace, by_kind, match.key)


def _make_match(
    tree: RadixTree,
    found: FoundRun,
    prompt: tuple[int, ...],
    num_match: int,
    namespace: bytes | None,
    tokens_by_kind: Mapping[MatchKind, int],
    key: bytes,
) -> PrefixMatch:
    """Return the match of a prompt: the pages found, the tokens by kind, and why no more is cached.

    Args:
        found: the longest run in the tree after which the prompt can resume.
        num_match: number of first ids that could have matched.
        namespace: the part of the tree that was searched; None: matching is off.
        key: the ids that were searched for, encoded.
    """
    return PrefixMatch(
        prompt_ids=prompt,
        num_match=num_match,
        namespace=namespace,
        tokens_by_kind=tokens_by_kind,
        pages=tuple(found.pages),
        partial=None if found.partial_page is None else PartialPage(found.partial_page, found.num_rows),
        why_not_more=WhyNotMore("off", 0)
        if namespace is None
        else _why_not_more(tree, found, prompt, len(key) // TOKEN_BYTES),
        version=tree.version,
        key=key,
    )


def _tokens_by_kind(kinds: bytes, num_tokens: int, num_known: int) -> dict[MatchKind, int]:
    """Count matched tokens by kind, strongest first.

    Tokens that the tree has beyond a walk count as its last token's kind.
    """
    kinds = kinds[:num_tokens] + kinds[-1:] * (num_tokens - len(kinds))
    num_seam = kinds[:num_known].count(EXACT)
    counts: dict[MatchKind, int] = {
        "exact": kinds.count(EXACT) - num_seam,
        "seam": num_seam,
        "text": kinds.count(TEXT),
        "alias": kinds.count(ALIAS),
    }
    return {kind: count for kind, count in counts.items() if count}


def _why_not_more(tree: RadixTree, found: FoundRun, prompt: tuple[int, ...], limit: int) -> WhyNotMore:
    """Return why a match of at most `limit` tokens ends where `found` does, with the next ids of cache and prompt."""
    position = found.num_tokens
    if position >= limit:
        return WhyNotMore("complete", position)
    kind: WhyKind
    if found.num_with_kv > position:
        kind = "no_window_rows" if tree.states is None else "no_state"
        return WhyNotMore(kind, position, num_with_kv=found.num_with_kv)
    kind = "evicted" if found.was_evicted else "differs" if found.ahead_ids else "unseen"
    wanted, cached = prompt[position : position + MAX_IDS_COMPARED], found.ahead_ids
    match_end = MatchEnd(prompt[max(position - MAX_BEFORE, 0) : position], cached, wanted)
    shown = cached[:MAX_IDS_SHOWN], wanted[:MAX_IDS_SHOWN]
    return WhyNotMore(kind, position, *shown, found.is_next_generated, match_end=match_end)
