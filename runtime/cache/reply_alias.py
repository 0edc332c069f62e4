"""Remember how a chat template renders a reply, if that differs from the text that the model generated.

Templates and clients trim replies, add a space before them, or change white space before a tool call. Then no later
prompt contains the reply's own text. The server that gave the reply knows both. Knows ids and bytes, not templates.
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from .radix_node import encode_key

_Key = tuple[bytes, int, bytes]  # namespace, number of a prompt's ids, digest of the ids


@dataclass(frozen=True)
class ReplyAlias:
    """A re-rendered reply: the ids that the model generated, without the end token, and their bytes in a later prompt.

    In that prompt the white space `after` and then a special token follow the reply.
    """

    ids: tuple[int, ...]
    rendered: bytes
    after: bytes = b""

    @classmethod
    def of(cls, ids: Sequence[int], text: str, rendering: str) -> ReplyAlias | None:
        """Return the alias of a reply that a template renders as `rendering`, up to the special token.

        None if the rendering begins with the reply's own text, or differs in more than white space. Leading white space
        is taken from the rendering. White space at the reply's end that the rendering lacks is ignored.

        >>> ReplyAlias.of([7, 8], "Sure.", " Sure. ")
        ReplyAlias(ids=(7, 8), rendered=b' Sure.', after=b' ')
        """
        end = _end_of(text, rendering)
        if not end or rendering.startswith(text):
            return None
        after = rendering[end:].removeprefix(text[len(text.rstrip()) :])
        if after.strip():
            return None
        return cls(tuple(ids), rendering[: len(rendering) - len(after)].encode(), after.encode())


class ReplyAliases:
    """The most recently used aliases of all namespaces, by the ids of the prompt that each reply answered.

    Attributes:
        recorded: called with the namespace, the prompt's ids and the alias by each `record`.
    """

    def __init__(self, max_tokens: int = 1 << 20, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.recorded: Callable[[bytes, Sequence[int], ReplyAlias], None] | None = None
        self._max_tokens = max_tokens
        self._clock = clock
        self._num_tokens = 0
        self._aliases: OrderedDict[_Key, dict[ReplyAlias, None]] = OrderedDict()  # a set in order
        self._used_at: dict[_Key, float] = {}
        self._num_of_length: Counter[tuple[bytes, int]] = Counter()  # prompts, by namespace and number of ids

    def record(self, namespace: bytes, prompt_ids: Sequence[int], alias: ReplyAlias) -> None:
        """Record that the namespace's reply to `prompt_ids` is re-rendered; the oldest aliases are forgotten."""
        self.restore(namespace, len(prompt_ids), prompt_digest(prompt_ids), alias)
        if self.recorded is not None:
            self.recorded(namespace, prompt_ids, alias)

    def restore(self, namespace: bytes, num_prompt_tokens: int, digest: bytes, alias: ReplyAlias) -> None:
        """Record an alias, given only the number of the prompt's ids and their `prompt_digest`."""
        key = (namespace, num_prompt_tokens, digest)
        if key not in self._aliases:
            self._aliases[key] = {}
            self._num_of_length[key[:2]] += 1
        if alias not in (known := self._aliases[key]):
            known[alias] = None
            self._num_tokens += len(alias.ids)
        self._use(key)
        while self._num_tokens > self._max_tokens:
            self._forget_aliases(next(iter(self._aliases)))

    def find(self, namespace: bytes, num_tokens: int, prompt_key: Callable[[], bytes]) -> tuple[ReplyAlias, ...]:
        """Return the aliases of the namespace's replies to exactly these ids.

        Calls `prompt_key` only if there is a reply to a prompt of `num_tokens` ids.
        """
        if (namespace, num_tokens) not in self._num_of_length:
            return ()
        key = (namespace, num_tokens, _digest(prompt_key()))
        if key not in self._aliases:
            return ()
        self._use(key)
        return tuple(self._aliases[key])

    def num_aliases(self, namespace: bytes) -> int:
        """Return how many of a namespace's prompts have an alias."""
        return sum(key[0] == namespace for key in self._aliases)

    def forget(self, namespace: bytes | None = None) -> None:
        """Forget the aliases of a namespace, or all."""
        for key in [key for key in self._aliases if namespace in (None, key[0])]:
            self._forget_aliases(key)

    def start_over(self) -> None:
        """Forget all aliases, whatever state this object is in."""
        self._num_tokens = 0
        for part in (self._aliases, self._used_at, self._num_of_length):
            part.clear()

    def forget_unused(self, since: float) -> None:
        """Forget the aliases that were neither recorded nor found since `since`, on the clock."""
        while self._aliases and self._used_at[next(iter(self._aliases))] < since:
            self._forget_aliases(next(iter(self._aliases)))

    def _use(self, key: _Key) -> None:
        self._aliases.move_to_end(key)
        self._used_at[key] = self._clock()

    def _forget_aliases(self, key: _Key) -> None:
        """Forget the aliases of one prompt, and update the counts."""
        self._num_tokens -= sum(len(old.ids) for old in self._aliases.pop(key))
        del self._used_at[key]
        self._num_of_length[key[:2]] -= 1
        if not self._num_of_length[key[:2]]:
            del self._num_of_length[key[:2]]


def _end_of(text: str, rendering: str) -> int | None:
    """Return the index in the rendering where all of the text, except white space, has come; None if they differ."""
    letters, done = "".join(text.split()), 0
    for word in re.finditer(r"\S+", rendering):
        if done == len(letters) or not letters.startswith(word[0], done):
            break
        done += len(word[0])
        if done == len(letters):
            return word.end()
    return None


def prompt_digest(prompt_ids: Sequence[int]) -> bytes:
    """Return a digest of a prompt's ids: 16 bytes."""
    return _digest(encode_key(prompt_ids))


def _digest(prompt_key: bytes) -> bytes:
    return blake2b(prompt_key, digest_size=16).digest()
