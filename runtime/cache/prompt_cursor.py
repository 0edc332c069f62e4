"""Follow a run of tokens along a prompt's text: by the prompt's own ids, and by the text that the tokens spell.

Knows one prompt and a position in its text; not the tree that the runs come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from radixlm.tokenizer_fix import SpelledPrompt, is_mark

from ..artifact.manifest import PAGE_SIZE
from .radix_node import TOKEN_BYTES, Key, encode_key, num_common_tokens, token_at
from .reply_alias import ReplyAlias

MAX_SEAM_TOKENS = 8  # client tokens whose encoding changed when a reply came after them; the most measured is 3
MAX_PAGE_TEXT = 4096  # bytes; a page hardly ever spells more


class PromptText:
    """The text of a prompt that is being matched, and the key of its first `num_match` ids, which can be looked up."""

    def __init__(self, spelled: SpelledPrompt, num_match: int) -> None:
        self.spelled = spelled
        self.key = encode_key(spelled.ids[:num_match])
        self.end = spelled.starts[num_match]

    def rest(self, offset: int, limit: int | None = None) -> tuple[int, ...] | None:
        """Return the prompt's ids from `offset` on, at least the first `limit`; None if no ids spell that text."""
        tail = self.tail(offset)
        if tail is None:
            return None
        extra, index = tail
        return (*extra, *self.spelled.ids[index : None if limit is None else index + limit])

    def tail(self, offset: int) -> tuple[tuple[int, ...], int] | None:
        """Return ids that spell the text from `offset` to the next of the prompt's own ids, and that one's index.

        There are none to spell if one of the prompt's own ids begins at `offset`. Returns None within a character, and
        if no ids spell the text.
        """
        index = self.spelled.canonical_index(offset)
        if index is not None:
            return (), index
        return self.spelled.tail(offset) if self.spelled.is_character_boundary(offset) else None

    def has_reply(self, alias: ReplyAlias, offset: int) -> bool:
        """Return whether the text from `offset` to the next special token is exactly the reply as rendered.

        A text that only begins or ends like the reply is a different text: "12" can be the beginning of "123".
        """
        rendered = alias.rendered + alias.after
        return self.spelled.text.startswith(rendered, offset) and self.spelled.has_mark(offset + len(rendered))

    def num_spelled(self, run: Key, start: int, stop: int, offset: int) -> tuple[int, int]:
        """Return how many of the tokens `[start, stop)` of a run spell the text at `offset`, and where they end.

        They end at the last whole character, if there is one. Compares pieces that double in size.
        """
        spell, text = self.spelled.spell, self.spelled.text
        done, step = start, PAGE_SIZE
        while done < stop:
            pieces = list(map(spell, tokens_of(run, done, min(done + step, stop))))
            joined = b"".join(pieces)
            if text.startswith(joined, offset) and offset + len(joined) <= self.end:
                done, offset, step = done + len(pieces), offset + len(joined), 2 * step
            else:
                for piece in pieces:
                    if not text.startswith(piece, offset) or offset + len(piece) > self.end:
                        break
                    done, offset = done + 1, offset + len(piece)
                break
        return self._cut_at_character(run, start, done, offset)

    def _cut_at_character(self, run: Key, start: int, stop: int, offset: int) -> tuple[int, int]:
        """Return how many of the tokens `[start, stop)` of a run to follow, and the text offset after them.

        They spell the text up to `offset`. The last ones are left out if they end within a character.
        If that leaves no token, all of them count.
        """
        last, end = stop, offset
        while last > start and not self.spelled.is_character_boundary(end):
            last -= 1
            end -= len(self.spelled.spell(token_at(run, last)))
        return (last - start, end) if last > start else (stop - start, offset)


class PromptCursor:
    """A position in the prompt, and the text or ids that are expected to follow.

    Expected is either a `script` of ids, or any ids that spell the text. The script is the continuation of the text
    after a reply. Or it is an alias: the ids of a reply that the prompt renders as another text. While an alias is
    followed, `offset` is its end minus the length of its remaining text.
    """

    __slots__ = ("_at", "_num_pending", "_prompt", "_script", "_start", "is_alias", "offset")

    def __init__(
        self, prompt: PromptText, offset: int = 0, *, alias: Sequence[int] = (), before: Sequence[int] = ()
    ) -> None:
        """Start at `offset`; with `alias`, right before ids that replace the text that ends at `offset`.

        The script is then the prompt's own ids `before` the alias, followed by the alias. At least one id of the alias
        must be followed before the cursor can leave it.
        """
        self._prompt = prompt
        self._script = encode_key([*before, *alias])
        self._start = len(before) * TOKEN_BYTES
        self._at = 0
        self._num_pending = 0  # client tokens that are followed in case a reply comes after them
        self.is_alias = bool(alias)
        self.offset = offset - sum(map(len, map(prompt.spelled.spell, (*before, *alias))))

    def copy(self) -> PromptCursor:
        """Return another cursor at the same position."""
        other = PromptCursor.__new__(PromptCursor)
        for name in PromptCursor.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    @property
    def may_leave(self) -> bool:
        """Return whether the rest of the prompt can follow here, as far as known without encoding anything."""
        if self._num_pending or (self.is_alias and self._at <= self._start):
            return False
        spelled = self._prompt.spelled
        return bool(self._script) or spelled.is_character_boundary(self.offset) or self.index is not None

    @property
    def is_sure(self) -> bool:
        """Return whether the rest of the prompt is known without encoding any text."""
        return bool(self._script) or self.index is not None

    @property
    def index(self) -> int | None:
        """Index of the prompt's id that begins here; None if none does."""
        return self._prompt.spelled.canonical_index(self.offset)

    def rest(self, limit: int | None = None) -> tuple[int, ...] | None:
        """Return the ids of the rest of the prompt, at least the first `limit`; None if no ids spell it."""
        script, text = self._script_left()
        rest = self._prompt.rest(self.offset + len(text), limit)
        return None if rest is None else (*script, *rest)

    def next_page(self) -> bytes:
        """Return the key of the next page of tokens, as a client's text would encode here."""
        return encode_key((self.rest(PAGE_SIZE) or ())[:PAGE_SIZE])

    def next_text(self) -> bytes:
        """Return at least the text that the next page of tokens spells."""
        _, text = self._script_left()
        offset = self.offset + len(text)
        return text + self._prompt.spelled.text[offset : offset + MAX_PAGE_TEXT]

    def reply_positions(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield each position within the next page at which a reply can begin, as `(ids, offset)`.

        `ids` are the client's from here up to it, `offset` is its place in the prompt's text.
        """
        ids = (self.rest(PAGE_SIZE) or ())[:PAGE_SIZE]
        offset = self.offset
        for count, token_id in enumerate(ids):
            if not self.is_alias or self._at + count * TOKEN_BYTES >= len(self._script):
                yield ids[:count], offset
            offset += len(self._prompt.spelled.spell(token_id))

    def _script_left(self) -> tuple[list[int], bytes]:
        """Return the remaining ids of the script, and the text that they spell."""
        ids = tokens_of(self._script, self._at // TOKEN_BYTES, len(self._script) // TOKEN_BYTES)
        return ids, b"".join(map(self._prompt.spelled.spell, ids))

    def step(self, run: Key, start: int, stop: int, is_generated: bool) -> int:
        """Follow the tokens `[start, stop)` of a run, all from a client or all generated; return how many match.

        0 if the tokens do not continue the prompt.
        """
        if is_generated and not self.is_alias:
            self._script = b""  # the script was for a client's text
        count = self._follow_ids(run, start, stop)
        if count or self.is_alias:
            return count
        return self._follow_reply(run, start, stop) if is_generated else self._follow_client(run, start, stop)

    def _follow_ids(self, run: Key, start: int, stop: int) -> int:
        """Follow tokens of the script, or of the prompt's encoding."""
        spelled, limit = self._prompt.spelled, stop - start
        if self._script:
            left = len(self._script) - self._at
            count = num_common_tokens(run, self._script, start * TOKEN_BYTES, self._at, min(limit * TOKEN_BYTES, left))
            self.offset += sum(map(len, map(spelled.spell, tokens_of(run, start, start + count))))
            self._at += count * TOKEN_BYTES
            if self._at == len(self._script):
                self._script, self.is_alias = b"", False
            return count
        index = None if self._num_pending else self.index
        if index is None:
            return 0
        count = num_common_tokens(run, self._prompt.key, start * TOKEN_BYTES, index * TOKEN_BYTES, limit * TOKEN_BYTES)
        self.offset = spelled.starts[index + count]
        return count

    def _follow_reply(self, run: Key, start: int, stop: int) -> int:
        """Follow generated tokens that spell the text, whatever their ids."""
        if self._num_pending and is_mark(self._prompt.spelled.spell(token_at(run, start))):
            return 0
        count, offset = self._prompt.num_spelled(run, start, stop, self.offset)
        if count:
            self._num_pending, self.offset = 0, offset
        return count

    def _follow_client(self, run: Key, start: int, stop: int) -> int:
        """Follow a client's tokens: the prompt's text after a reply, in the client's encoding; return how many match.

        Else follow a single token that spells the text: its encoding can depend on a reply that comes after it.
        """
        spelled = self._prompt.spelled
        if not self._script and not self._num_pending and self.index is None:
            tail = self._prompt.tail(self.offset)  # None within a character: such a prompt continues a reply
            self._script, self._at = b"" if tail is None else encode_key(tail[0]), 0
            if self._script and (count := self._follow_ids(run, start, stop)):
                return count
        piece = spelled.spell(token_at(run, start))
        offset = self.offset + len(piece)
        if self._num_pending == MAX_SEAM_TOKENS or is_mark(piece) or offset > self._prompt.end:
            return 0
        if not spelled.text.startswith(piece, self.offset):
            return 0
        self._script, self._num_pending, self.offset = b"", self._num_pending + 1, offset
        return 1


def tokens_of(run: Key, start: int, stop: int) -> list[int]:
    """Return the tokens `[start, stop)` of a run."""
    tokens: list[int] = np.frombuffer(bytes(run[start * TOKEN_BYTES : stop * TOKEN_BYTES]), ">u4").tolist()
    return tokens
