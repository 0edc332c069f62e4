"""Hold one run of tokens in the tree, the pages of its KV, and the runs that continue it.

Knows bytes, page ids and order. Not the pool, and not when to evict.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ..artifact.manifest import PAGE_SIZE
from .spelled_children import SpelledChildren

Key = bytes | bytearray
TOKEN_BYTES = 4
PAGE_BYTES = PAGE_SIZE * TOKEN_BYTES  # of token ids, not of KV
MAX_EVICTED_REMEMBERED = 64
MAX_CHILDREN_COMPARED = 64


def encode_key(token_ids: Iterable[int]) -> bytes:
    """Encode each token as four big-endian bytes: equality is one memcmp, and keys sort as the tokens do.

    >>> encode_key([1, 256])
    b'\\x00\\x00\\x00\\x01\\x00\\x00\\x01\\x00'
    """
    key = array("I", token_ids)  # a third of the time that NumPy needs for a list
    if sys.byteorder == "little":
        key.byteswap()
    return key.tobytes()


def tokens_of(key: Key) -> tuple[int, ...]:
    """Return the tokens of a key.

    >>> tokens_of(encode_key([1, 256]))
    (1, 256)
    """
    return struct.unpack(f">{len(key) // TOKEN_BYTES}I", key)


def token_at(key: Key, index: int) -> int:
    """Return token `index` of a key."""
    return int.from_bytes(key[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES], "big")


def num_common_tokens(run: Key, key: Key, run_start: int = 0, key_start: int = 0, limit: int | None = None) -> int:
    """Return how many tokens `run[run_start:]` and `key[key_start:]` have in common at their beginning.

    Starts and limit are in bytes. Compares pieces that double in size, so that the cost depends on the result and not
    on the run.
    """
    length = min(len(run) - run_start, len(key) - key_start)
    length = length if limit is None else min(length, limit)
    done, step = 0, PAGE_BYTES
    while done < length:
        stop = min(done + step, length)
        ours, theirs = run[run_start + done : run_start + stop], key[key_start + done : key_start + stop]
        if ours != theirs:
            differ = np.frombuffer(ours, np.uint32) != np.frombuffer(theirs, np.uint32)
            return done // TOKEN_BYTES + int(differ.argmax())
        done, step = stop, 2 * step
    return length // TOKEN_BYTES


class Path(NamedTuple):
    """The tokens from a root to a node as a key, their pages, and one byte a token, 1 if a model generated it."""

    namespace: bytes
    key: bytes
    page_ids: list[int]
    generated: bytes


@dataclass(eq=False)
class Node:
    """A run of full pages, or a tail: a leaf with one page of which only the first rows are valid.

    The run begins `start` pages below the root and has `len(run) // TOKEN_BYTES` tokens. Siblings are sorted by their
    first page of tokens. No two of them have the same full page, but they can begin with the same rows.

    Attributes:
        generated: one byte a token, 1 if a model generated it.
        evicted: keys of first pages of evicted continuations, oldest first.
        disk_keys: keys under which the disk has the run's first pages, as far as they were computed.
    """

    node_id: int
    parent: Node | None
    start: int
    run: bytearray = field(default_factory=bytearray)
    pages: list[int] = field(default_factory=list)
    generated: bytearray = field(default_factory=bytearray)
    last_used: int = 0  # a number that rises with each use
    used_at: float = 0.0  # time of the last use, in seconds
    keys: list[bytes] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)
    evicted: dict[bytes, None] = field(default_factory=dict)
    disk_keys: list[bytes] = field(default_factory=list)
    namespace: bytes = b""  # set for roots only
    spelled: SpelledChildren[Node] | None = None  # made when a text is first searched for here

    @property
    def is_tail(self) -> bool:
        """Return whether its one page is partial."""
        return len(self.run) < PAGE_BYTES * len(self.pages)

    @property
    def key(self) -> bytes:
        """Tokens of its first page, by which its parent sorts it."""
        return bytes(self.run[:PAGE_BYTES])

    @property
    def num_tokens(self) -> int:
        """Number of tokens in its run."""
        return len(self.run) // TOKEN_BYTES

    def path(self) -> Path:
        """Return the path from the root to the end of this run."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        nodes.reverse()
        return Path(
            namespace=nodes[0].namespace,
            key=b"".join(node.run for node in nodes),
            page_ids=[page for node in nodes for page in node.pages],
            generated=b"".join(node.generated for node in nodes),
        )

    def tokens(self, start: int, most: int) -> tuple[int, ...]:
        """Return at most `most` tokens of the run from index `start`, continued in the child used last if needed."""
        own = tokens_of(self.run[start * TOKEN_BYTES : (start + most) * TOKEN_BYTES])
        if len(own) == most or not 0 < len(self.children) <= MAX_CHILDREN_COMPARED:
            return own
        return own + max(self.children, key=lambda child: child.last_used).tokens(0, most - len(own))

    def ahead(self, key: bytes, most: int, start: int) -> tuple[int, ...]:
        """Return at most `most` tokens that follow `key`, in the runs used last; `key` begins at index `start` of this
        run.
        """
        common = num_common_tokens(self.run, key, start * TOKEN_BYTES)
        node, done = self, common * TOKEN_BYTES
        if start + common < self.num_tokens:
            return self.tokens(start + common, most) if done == len(key) else ()
        while done < len(key):
            child, common = node.nearest(key, done)
            if child is None or common == 0:
                return ()
            common = num_common_tokens(child.run, key, 0, done)
            if done + common * TOKEN_BYTES == len(key) and common < child.num_tokens:
                return child.tokens(common, most)
            if common < child.num_tokens:
                return ()
            node, done = child, done + len(child.run)
        return node.tokens(node.num_tokens, most)

    def nearest(self, key: bytes, key_start: int) -> tuple[Node | None, int]:
        """Return the child whose first page shares the most tokens with `key[key_start:]`, and their number.

        Siblings are sorted, so it is one of the two next to the position where the key belongs.
        """
        wanted = key[key_start : key_start + PAGE_BYTES]
        place = bisect_left(self.keys, wanted)
        best, most = None, -1
        for index in (place, place - 1):
            if 0 <= index < len(self.keys):
                common = num_common_tokens(self.keys[index], wanted)
                if common > most:
                    best, most = self.children[index], common
        return best, max(most, 0)

    def spelled_like(self, text: bytes, spell: Callable[[int], bytes]) -> Iterable[tuple[Node, int | None]]:
        """Return children that can spell the beginning of `text`, with a bound for each: see `SpelledChildren.like`."""
        if self.spelled is None:
            self.spelled = SpelledChildren(spell)
            for child in self.children:
                self.spelled.add(child)
        return self.spelled.like(text)

    def spelled_page(self, spell: Callable[[int], bytes]) -> tuple[bytes, int]:
        """Return the text of its first page, and the ends of its tokens: bit `n` is set for an end after `n` bytes."""
        pieces = [spell(token_at(self.run, i)) for i in range(min(PAGE_SIZE, len(self.run) // TOKEN_BYTES))]
        return b"".join(pieces), sum(1 << end for end in accumulate(map(len, pieces), initial=0))

    def child(self, page_key: bytes) -> Node | None:
        """Return the child whose first page is exactly this; None if there is none."""
        place = bisect_left(self.keys, page_key)
        if place < len(self.keys) and self.keys[place] == page_key:
            return self.children[place]
        return None

    def beginning_with(self, rows: bytes) -> Node | None:
        """Return a child whose first page begins with `rows`; None if there is none."""
        place = bisect_left(self.keys, rows)
        if place < len(self.keys) and self.keys[place].startswith(rows):
            return self.children[place]
        return None

    def tail_before(self, page_key: bytes) -> Node | None:
        """Return the child that is a partial page and holds the first tokens of the full page `page_key`.

        None if there is none. It would be the sibling right before that page.
        """
        place = bisect_left(self.keys, page_key)
        if place > 0 and self.children[place - 1].is_tail and page_key.startswith(self.keys[place - 1]):
            return self.children[place - 1]
        return None

    def add(self, child: Node) -> None:
        """Insert a child in order."""
        place = bisect_left(self.keys, child.key)
        self.keys.insert(place, child.key)
        self.children.insert(place, child)
        if self.spelled is not None:
            self.spelled.add(child)

    def remove(self, child: Node) -> None:
        """Remove a child."""
        place = bisect_left(self.keys, child.key)
        assert self.children[place] is child
        del self.keys[place], self.children[place]
        if self.spelled is not None:
            self.spelled.remove(child)

    def remember_evicted(self, page: bytes) -> None:
        """Remember the first page of an evicted continuation; beyond the limit the oldest is forgotten."""
        self.evicted.pop(page, None)
        self.evicted[page] = None
        if len(self.evicted) > MAX_EVICTED_REMEMBERED:
            del self.evicted[next(iter(self.evicted))]

    def was_evicted(self, page: Key, num_tokens: int) -> bool:
        """Return whether a continuation evicted here shared more than the first `num_tokens` tokens of `page`."""
        return any(num_common_tokens(gone, page) > num_tokens for gone in self.evicted)

    def mark_generated(self, offset: int, generated: Key) -> None:
        """Mark generated tokens, from token `offset` on, even if a client wrote them first."""
        if any(generated):
            old = self.generated[offset : offset + len(generated)]
            self.generated[offset : offset + len(generated)] = either(old, generated)

    def split(self, num_pages: int, lower_id: int) -> Node:
        """Cut the run after `num_pages` pages; the lower part becomes its only child, which is returned."""
        assert 0 < num_pages < len(self.pages)
        cut = num_pages * PAGE_SIZE
        lower = Node(
            lower_id,
            parent=self,
            start=self.start + num_pages,
            run=self.run[cut * TOKEN_BYTES :],
            pages=self.pages[num_pages:],
            generated=self.generated[cut:],
            last_used=self.last_used,
            used_at=self.used_at,
            keys=self.keys,
            children=self.children,
            evicted=self.evicted,
            spelled=self.spelled,
            disk_keys=self.disk_keys[num_pages:],
        )
        for child in lower.children:
            child.parent = lower
        del self.run[cut * TOKEN_BYTES :], self.pages[num_pages:], self.generated[cut:], self.disk_keys[num_pages:]
        self.keys, self.children, self.evicted, self.spelled = [lower.key], [lower], {}, None
        return lower


def either(ours: Key, theirs: Key) -> bytes:
    """Return the bytewise OR of two keys of equal length.

    >>> either(bytes([0, 1, 0]), bytes([0, 1, 1]))
    b'\\x00\\x01\\x01'
    """
    return (int.from_bytes(ours, "big") | int.from_bytes(theirs, "big")).to_bytes(len(ours), "big")
