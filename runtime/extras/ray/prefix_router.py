"""Choose the replica that holds a prompt's longest prefix, unless it is overloaded.

Knows texts as bytes, namespaces, names of replicas and how many requests each has; not where replicas are or how they
are asked. A replica is taken to hold the texts that were sent to it. They are kept as digests of their blocks, up to a
number for each replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile

from cachetools import Cache, LRUCache


@dataclass(frozen=True)
class RouterPolicy:
    """How texts are remembered, and how much busier than others the holder of a prefix may be.

    A text is cut in blocks of `block_bytes`, of which the first `max_blocks_of_text` count; of each replica the
    `max_blocks` used last are remembered, 260 bytes of memory each. A replica is overloaded when it has `max_lead`
    requests more than the one that has fewest.
    """

    block_bytes: int = 64
    max_blocks_of_text: int = 4096
    max_blocks: int = 1 << 17
    max_lead: int = 8


class PrefixRouter:
    """Remembers which texts each of `replicas` was sent. One thread uses it.

    >>> router = PrefixRouter(["a", "b"])
    >>> talk = b"A long conversation about radix trees, from its very first word on..."
    >>> router.choose(b"", talk, {"a": 1, "b": 0})
    'b'
    >>> router.record("b", b"", talk)
    >>> router.choose(b"", talk + b" and on", {"a": 1, "b": 7}), router.choose(b"", talk, {"a": 1, "b": 9})
    ('b', 'a')
    """

    def __init__(self, replicas: Iterable[str], policy: RouterPolicy | None = None) -> None:
        self._policy = policy or RouterPolicy()
        self._held = {name: self._nothing() for name in replicas}

    @property
    def max_text_bytes(self) -> int:
        """How much of a text counts."""
        return self._policy.block_bytes * self._policy.max_blocks_of_text

    def choose(self, namespace: bytes, text: bytes, loads: Mapping[str, int]) -> str:
        """One of the replicas in `loads`, which maps at least one replica to the number of its requests.

        Of the replicas that are not overloaded the one with the longest prefix wins, then the one with the fewest
        requests, then the one that holds least, so that new conversations spread.
        """
        most = min(loads.values()) + self._policy.max_lead
        blocks = self._blocks(namespace, text)
        return min(
            (name for name in loads if loads[name] < most or loads[name] == min(loads.values())),
            key=lambda name: (-self._num_held(name, blocks), loads[name], len(self._held[name])),
        )

    def record(self, replica: str, namespace: bytes, text: bytes) -> None:
        """Note that the replica gets this text, and will hold it."""
        held = self._held[replica]
        for block in reversed(self._blocks(namespace, text)):  # the first ones are forgotten last
            held[block] = namespace

    def num_held_bytes(self, replica: str, namespace: bytes, text: bytes) -> int:
        """How many bytes of the text the replica was sent before, in whole blocks."""
        return self._num_held(replica, self._blocks(namespace, text)) * self._policy.block_bytes

    def forget(self, replica: str) -> None:
        """Note that the replica holds nothing, because it was started anew."""
        self._held[replica] = self._nothing()

    def forget_namespace(self, namespace: bytes) -> None:
        """Note that no replica holds anything of the namespace."""
        for held in self._held.values():
            held.forget(namespace)

    def _nothing(self) -> _HeldBlocks:
        """What a new replica holds."""
        return _HeldBlocks(self._policy.max_blocks)

    def _num_held(self, replica: str, blocks: Sequence[bytes]) -> int:
        return sum(1 for _ in takewhile(self._held[replica].__contains__, blocks))

    def _blocks(self, namespace: bytes, text: bytes) -> list[bytes]:
        """A digest for each whole block, of all up to its end and of the namespace."""
        size = self._policy.block_bytes
        num_blocks = min(len(text) // size, self._policy.max_blocks_of_text)
        digest = blake2b(len(namespace).to_bytes(8, "big") + namespace, digest_size=16)
        blocks = []
        for number in range(num_blocks):
            digest.update(text[number * size : (number + 1) * size])
            blocks.append(digest.digest())
        return blocks


class _HeldBlocks(LRUCache[bytes, bytes]):
    """Digests of blocks, those used last, with the namespaces that they belong to."""

    def __init__(self, max_blocks: int) -> None:
        super().__init__(max_blocks)
        self._by_namespace: dict[bytes, set[bytes]] = {}

    def __setitem__(self, block: bytes, namespace: bytes) -> None:
        super().__setitem__(block, namespace)
        self._by_namespace.setdefault(namespace, set()).add(block)

    def __delitem__(self, block: bytes) -> None:
        namespace = Cache.__getitem__(self, block)  # the cache's own method is a use
        super().__delitem__(block)
        blocks = self._by_namespace[namespace]
        blocks.remove(block)
        if not blocks:
            del self._by_namespace[namespace]

    def forget(self, namespace: bytes) -> None:
        """Drop the blocks of a namespace, without a look at those of others: any client may ask for it."""
        for block in [*self._by_namespace.get(namespace, ())]:
            del self[block]
