"""Pages in a file that can be carried elsewhere: the same pages give the same bytes, wherever they were stored.

A bundle names the model, but no namespace, directory or time. The import says which namespace the pages belong to.

A bundle may come from an attacker. The import compares every size with the size of the file before it takes memory, and
every page with its checksum. No check can tell whether keys and values belong to their tokens: import only bundles from
a source whose programs you would run. The layout::

    magic, version, bytes of the identity, number of pages, the identity
    of each page: number of its parent in the bundle (-1: it has none), 16 token ids, 16 flags, checksum of the payload
    checksum of all before
    the payloads, one behind the other
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import StoreCorrupt, StoreError, StoreMismatch
from .page_key import NO_PARENT, PageKey, StoreIdentity, pack_tokens, unpack_tokens
from .page_store import PageStore
from .record import CHECKSUM_BYTES, checksum, is_sealed, sealed

FORMAT_VERSION: Final = 1
_MAGIC: Final = b"RLXBNDL\n"
_START: Final = struct.Struct("<8sIIQ")
_PAGE: Final = struct.Struct(f"<q64s16s{CHECKSUM_BYTES}s")
_MAX_IDENTITY_BYTES: Final = 1 << 20
_BYTES_AT_ONCE: Final = 32 << 20


class PageSource(Protocol):
    """What pages are exported from: a PageStore, or StoredPages beside a server."""

    @property
    def identity(self) -> StoreIdentity: ...

    def read(self, heads: Sequence[PageKey], out: NDArray[np.uint8]) -> int: ...


@dataclass(frozen=True)
class ImportReport:
    """What became of a bundle."""

    num_pages: int
    num_stored: int  # of these, pages that the store has now; it may have had some of them before


def is_bundle(path: str | Path) -> bool:
    """Whether a file begins as a bundle does.

    Raises:
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def export_bundle(source: PageSource, heads: Sequence[PageKey], path: str | Path) -> None:
    """Write pages to a file. The file gets its name when it is complete, and only its owner may read it, as with the
    files of the store.

    Args:
        heads: the pages, and all pages before them in their prompts.

    Raises:
        StoreError: the parent of a page is missing, the pages have several namespaces, or a page cannot be read.
        OSError: the file cannot be written.
    """
    ordered, parents = _in_order(heads)
    identity, path = source.identity, Path(path)
    checksums = [checksum(row.data) for rows in _payloads(source, ordered) for row in rows]
    pages = b"".join(
        _PAGE.pack(parent, pack_tokens(head.token_ids), head.generated, digest)
        for parent, head, digest in zip(parents, ordered, checksums, strict=True)
    )
    text = identity.to_json()
    table = _START.pack(_MAGIC, FORMAT_VERSION, len(text), len(ordered)) + text + pages
    unnamed = path.with_name(path.name + ".new")
    try:
        unnamed.unlink(missing_ok=True)  # it would keep its mode
        with open(unnamed, "xb", opener=partial(os.open, mode=0o600)) as file:
            file.write(sealed(table, len(table) + CHECKSUM_BYTES))
            for rows in _payloads(source, ordered):
                file.write(rows.data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unnamed, path)
    finally:
        unnamed.unlink(missing_ok=True)


def import_bundle(store: PageStore, path: str | Path, namespace: bytes, *, evicts: bool = True) -> ImportReport:
    """Store the pages of a file in a namespace.

    Args:
        evicts: whether stored pages make room for the new ones; if not, the import leaves out pages without room.

    Raises:
        StoreMismatch: the pages belong to another model, or to another version of radixlm.
        StoreCorrupt: the file is no bundle, or it is damaged; the pages before the damage are stored.
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as file:
        bundle = _Bundle.read(file, Path(path), store.identity)
        heads, num_stored = bundle.heads(namespace), 0
        for first, rows in bundle.payloads(file):
            num_stored += len(store.put(heads[first : first + len(rows)], rows, evicts=evicts).stored)
        return ImportReport(len(heads), num_stored)


@dataclass(frozen=True)
class _Bundle:
    """The checked table of a bundle."""

    path: Path
    identity: StoreIdentity
    pages: tuple[tuple[int, bytes, bytes, bytes], ...]  # parent, tokens, flags, checksum

    @classmethod
    def read(cls, file: BinaryIO, path: Path, wanted: StoreIdentity) -> _Bundle:
        num_bytes = os.fstat(file.fileno()).st_size
        start = file.read(_START.size)
        if len(start) < _START.size or not start.startswith(_MAGIC):
            raise StoreCorrupt(f"{path} is no bundle of pages; give a file that `radixlm store export` wrote")
        _, version, identity_bytes, num_pages = _START.unpack(start)
        if version != FORMAT_VERSION:
            raise StoreMismatch(f"{path} has version {version}, this radixlm reads {FORMAT_VERSION}; export it again")
        table_bytes = _START.size + identity_bytes + num_pages * _PAGE.size + CHECKSUM_BYTES
        if identity_bytes > _MAX_IDENTITY_BYTES or table_bytes > num_bytes:
            raise StoreCorrupt(f"{path} has {num_bytes} bytes and says that its table alone has {table_bytes}")
        table = start + file.read(table_bytes - _START.size)
        if len(table) != table_bytes or not is_sealed(table):
            raise StoreCorrupt(f"{path} broke: its table is not what was written; export it again")
        identity = StoreIdentity.from_json(table[_START.size : _START.size + identity_bytes])
        if identity != wanted:
            raise StoreMismatch(f"{path} is of another model: {_difference(identity, wanted)}")
        expected = table_bytes + num_pages * identity.page_bytes
        if expected != num_bytes:
            raise StoreCorrupt(f"{path} has {num_bytes} bytes, its {num_pages} pages need {expected}; export it again")
        pages = tuple(_PAGE.iter_unpack(table[_START.size + identity_bytes : -CHECKSUM_BYTES]))
        for i, (parent, _, generated, _) in enumerate(pages):
            if not -1 <= parent < i or generated.strip(b"\0\1"):
                raise StoreCorrupt(f"{path} broke: its page {i} has parent {parent}, flags {generated.hex()}")
        return cls(path, identity, pages)

    def heads(self, namespace: bytes) -> list[PageKey]:
        """The keys that the pages have in a namespace."""
        heads: list[PageKey] = []
        for parent, tokens, generated, _ in self.pages:
            parent_key = heads[parent].key if parent >= 0 else NO_PARENT
            heads.append(PageKey.of(self.identity, namespace, parent_key, unpack_tokens(tokens), generated))
        return heads

    def payloads(self, file: BinaryIO) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """The payloads in portions, `[N, page_bytes]`, each with the number of its first page."""
        page_bytes = self.identity.page_bytes
        at_once = max(1, _BYTES_AT_ONCE // page_bytes)
        for first in range(0, len(self.pages), at_once):
            num_pages = min(at_once, len(self.pages) - first)
            rows = np.frombuffer(file.read(num_pages * page_bytes), np.uint8)
            if rows.size != num_pages * page_bytes:
                raise StoreCorrupt(f"{self.path} ended while it was read")
            rows = rows.reshape(num_pages, page_bytes)
            for i, row in enumerate(rows, first):
                if checksum(row.data) != self.pages[i][3]:
                    raise StoreCorrupt(f"{self.path} broke: page {i} is not what was written; export it again")
            yield first, rows


def _in_order(heads: Sequence[PageKey]) -> tuple[list[PageKey], list[int]]:
    """The pages with parents before children, and the place of each page's parent, -1 without one. The order depends
    on the tokens alone.
    """
    if len({head.namespace for head in heads}) > 1:
        raise StoreError("pages of several namespaces do not fit into one bundle; export them one by one")
    children: dict[bytes, list[PageKey]] = {}
    for head in {head.key: head for head in heads}.values():
        children.setdefault(head.parent_key, []).append(head)
    ordered, number = list[PageKey](), {NO_PARENT: -1}
    waiting = [NO_PARENT]
    for key in waiting:
        for head in sorted(children.get(key, []), key=lambda head: head.token_ids):
            number[head.key] = len(ordered)
            ordered.append(head)
            waiting.append(head.key)
    if len(ordered) != len({head.key for head in heads}):
        raise StoreError(f"{len(heads)} pages were to be exported, {len(ordered)} have all those before them")
    return ordered, [number[head.parent_key] for head in ordered]


def _payloads(source: PageSource, heads: Sequence[PageKey]) -> Iterator[NDArray[np.uint8]]:
    page_bytes = source.identity.page_bytes
    at_once = max(1, _BYTES_AT_ONCE // page_bytes)
    out = np.empty((min(at_once, len(heads)), page_bytes), np.uint8)
    for first in range(0, len(heads), at_once):
        some = heads[first : first + at_once]
        num_read = source.read(some, out)
        if num_read < len(some):
            raise StoreError(
                f"page {first + num_read} of {len(heads)} cannot be read; `radixlm store verify` says what is wrong"
            )
        yield out[: len(some)]


def _difference(found: StoreIdentity, wanted: StoreIdentity) -> str:
    ours, theirs = asdict(wanted), asdict(found)
    name = next(name for name in ours if ours[name] != theirs[name])
    return f"its {name} is {theirs[name]!s:.100}, this store's is {ours[name]!s:.100}; export it there again"
