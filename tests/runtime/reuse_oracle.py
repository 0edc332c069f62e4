"""What a prompt may reuse of one computed sequence, token by token: the slow, obvious version of the walk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from radixlm.runtime.cache.prompt_cursor import MAX_SEAM_TOKENS
from radixlm.runtime.cache.reply_alias import ReplyAlias
from radixlm.tokenizer_fix import SpelledPrompt, is_mark

Aliases = Mapping[tuple[int, ...], Sequence[ReplyAlias]]  # by the ids of the prompt that was replied to


@dataclass(frozen=True)
class Reuse:
    """The first `num_tokens` ids stand for the prompt's text up to `reach`; it goes on with the ids `rest`."""

    num_tokens: int
    reach: int
    rest: tuple[int, ...]


@dataclass(frozen=True)
class _State:
    done: int = 0
    offset: int = 0
    expected: tuple[int, ...] | None = None  # the ids that a client's text must have; None: as encoded from here
    num_pending: int = 0
    in_reply: bool = False


def reuses(
    prompt: SpelledPrompt,
    ids: Sequence[int],
    generated: Sequence[bool],
    aliases: Aliases,
    *,
    num_match: int | None = None,
    state: _State | None = None,
) -> Iterator[Reuse]:
    """Every way to begin the prompt with tokens of the sequence.

    What was generated must spell the prompt, between the same special tokens and up to the end of a character. What a
    client wrote must have the ids that the prompt has there, but for the last few before a reply.
    """
    end = prompt.starts[len(prompt.ids) if num_match is None else num_match]
    state = state or _State()
    while True:
        expected = state.expected if state.expected is not None else _tail(prompt, state.offset)
        if not state.num_pending and expected is not None:
            yield Reuse(state.done, state.offset, expected)
        if state.done == len(ids):
            return
        if generated[state.done] and not state.in_reply:
            for alias in aliases.get(tuple(ids[: state.done]), ()):
                yield from _reuses_of_alias(prompt, ids, generated, aliases, alias, state, end, num_match)
        token = ids[state.done]
        piece = prompt.spell(token)
        offset = state.offset + len(piece)
        if not prompt.text.startswith(piece, state.offset) or offset > end:
            return
        if generated[state.done] and not is_mark(piece):
            state = _State(state.done + 1, offset, in_reply=True)
        elif not state.num_pending and expected is not None and expected[:1] == (token,):
            state = _State(state.done + 1, offset, expected[1:])
        elif is_mark(piece) or state.num_pending == MAX_SEAM_TOKENS:
            return
        else:
            state = _State(state.done + 1, offset, None, state.num_pending + 1)


def _reuses_of_alias(
    prompt: SpelledPrompt,
    ids: Sequence[int],
    generated: Sequence[bool],
    aliases: Aliases,
    alias: ReplyAlias,
    state: _State,
    end: int,
    num_match: int | None,
) -> Iterator[Reuse]:
    """The same, if the reply stands in the prompt as it is rendered, up to a special token."""
    offset = state.offset + len(alias.rendered)
    if not prompt.text.startswith(alias.rendered, state.offset) or offset > end:
        return
    after = prompt.text[offset:]
    if not after.startswith(alias.after) or not is_mark(after[len(alias.after) :] or b" "):
        return
    tail = _tail(prompt, offset)
    if tail is None:
        return
    done = state.done
    for taken, token in enumerate(alias.ids):
        if done == len(ids) or ids[done] != token:
            return
        done += 1
        left = alias.ids[taken + 1 :]
        yield Reuse(done, offset - sum(len(prompt.spell(token_id)) for token_id in left), (*left, *tail))
    yield from reuses(prompt, ids, generated, aliases, num_match=num_match, state=_State(done, offset, in_reply=True))


def _tail(prompt: SpelledPrompt, offset: int) -> tuple[int, ...] | None:
    """The ids that the prompt goes on with from `offset`."""
    if (index := prompt.canonical_index(offset)) is not None:
        return tuple(prompt.ids[index:])
    if not prompt.is_character_boundary(offset) or (tail := prompt.tail(offset)) is None:
        return None
    return (*tail[0], *prompt.ids[tail[1] :])
