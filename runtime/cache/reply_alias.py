"""Remember how a chat template renders a reply, where that is another text than the model generated.

Templates and clients trim replies, or put a space before them, or other white space before a call of a tool: then no
later prompt has the reply's own text. The server that gave the reply knows both. Knows ids and bytes, not templates.
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from .radix_node import encode_key

_Key = tuple[bytes, int, bytes]  # namespace, number and digest of a prompt's ids


@dataclass(frozen=True)
class ReplyAlias:
    """A reply's ids, without the end token, and the bytes that stand for them in a later prompt.

    There a special token stands behind the reply, and between both the white space `after`.
    """

    ids: tuple[int, ...]
    rendered: bytes
    after: bytes = b""

    @classmethod
    def of(cls, ids: Sequence[int], text: str, rendering: str) -> ReplyAlias | None:
        """The alias of a reply that a template renders so, up to the special token; None where that is its own text.

        Only white space may differ: what it begins with is taken from the rendering, and what it ends with and the
        rendering lacks is passed over.

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
    """The aliases used last of all namespaces, by the ids of the prompt that was replied to.

    Attributes:
        recorded: told of the namespace, the prompt's ids and the alias with each `record`.
    """

    def __init__(self, max_tokens: int = 1 << 20, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.recorded: Callable[[bytes, Sequence[int], ReplyAlias], None] | None = None
        self._max_tokens = max_tokens
        self._clock = clock
        self._num_tokens = 0
        self._aliases: OrderedDict[_Key, dict[ReplyAlias, None]] = OrderedDict()  # a set in order
        self._used_at: dict[_Key, float] = {}
        self._num_of_length: Counter[tuple[bytes, int]] = Counter()  # prompts of so many ids

    def record(self, namespace: bytes, prompt_ids: Sequence[int], alias: ReplyAlias) -> None:
        """Note that the namespace's reply to `prompt_ids` is rendered so; the oldest are forgotten."""
        self.restore(namespace, len(prompt_ids), prompt_digest(prompt_ids), alias)
        if self.recorded is not None:
            self.recorded(namespace, prompt_ids, alias)

    def restore(self, namespace: bytes, num_prompt_tokens: int, digest: bytes, alias: ReplyAlias) -> None:
        """Note it, too, where only the number of the prompt's ids and their `prompt_digest` are known."""
        key = (namespace, num_prompt_tokens, digest)
        if key not in self._aliases:
            self._aliases[key] = {}
            self._num_of_length[key[:2]] += 1
        if alias not in (known := self._aliases[key]):
            known[alias] = None
            self._num_tokens += len(alias.ids)
        self._use(key)
        while self._num_tokens > self._max_tokens:
            self._drop(next(iter(self._aliases)))

    def find(self, namespace: bytes, num_tokens: int, prompt_key: Callable[[], bytes]) -> tuple[ReplyAlias, ...]:
        """The aliases of the namespace's replies to exactly these ids, which are asked for only if some are as many."""
        if (namespace, num_tokens) not in self._num_of_length:
            return ()
        key = (namespace, num_tokens, _digest(prompt_key()))
        if key not in self._aliases:
            return ()
        self._use(key)
        return tuple(self._aliases[key])

    def num_aliases(self, namespace: bytes) -> int:
        """How many of a namespace's replies have one."""
        return sum(key[0] == namespace for key in self._aliases)

    def forget(self, namespace: bytes | None = None) -> None:
        """Forget a namespace's aliases, or all."""
        for key in [key for key in self._aliases if namespace in (None, key[0])]:
            self._drop(key)

    def start_over(self) -> None:
        """Forget all, in whatever state it is."""
        self._num_tokens = 0
        for part in (self._aliases, self._used_at, self._num_of_length):
            part.clear()

    def forget_unused(self, since: float) -> None:
        """Forget what was neither recorded nor found since then, on the clock."""
        while self._aliases and self._used_at[next(iter(self._aliases))] < since:
            self._drop(next(iter(self._aliases)))

    def _use(self, key: _Key) -> None:
        self._aliases.move_to_end(key)
        self._used_at[key] = self._clock()

    def _drop(self, key: _Key) -> None:
        self._num_tokens -= sum(len(old.ids) for old in self._aliases.pop(key))
        del self._used_at[key]
        self._num_of_length[key[:2]] -= 1
        if not self._num_of_length[key[:2]]:
            del self._num_of_length[key[:2]]


def _end_of(text: str, rendering: str) -> int | None:
    """Where the rendering has said all of the text but for white space; None: it says something else."""
    letters, done = "".join(text.split()), 0
    for word in re.finditer(r"\S+", rendering):
        if done == len(letters) or not letters.startswith(word[0], done):
            break
        done += len(word[0])
        if done == len(letters):
            return word.end()
    return None


def prompt_digest(prompt_ids: Sequence[int]) -> bytes:
    """16 bytes over a prompt's ids."""
    return _digest(encode_key(prompt_ids))


def _digest(prompt_key: bytes) -> bytes:
    return blake2b(prompt_key, digest_size=16).digest()
