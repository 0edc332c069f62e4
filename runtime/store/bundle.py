"""Export pages to a portable file, and import them. The same pages always give the same bytes.

A bundle names the model, but no namespace, LoRA adapter, directory or time. The import chooses the namespace of the
pages, so pages that were computed with an adapter are not exported.

A bundle can come from an attacker. The import compares every size with the size of the file before it allocates memory,
and verifies the checksum of every page. No check can tell whether KV belongs to its tokens: import only bundles from a
source whose programs you would run. The layout::

    magic, version, bytes of the identity, number of pages, the identity
    of each page: number of its parent in the bundle (-1: it has none), 16 token ids, 16 flags, checksum of the payload
    checksum of all before
    the payloads, one after the other
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

from ..cache.cache_namespace import is_adapted
from ..errors import StoreCorrupt, StoreError, StoreMismatch
from ..system import sync_file
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
    """A source of pages to export: a `PageStore`, or `StoredPages` while a server writes the store."""

    @property
    def identity(self) -> StoreIdentity:
        """The identity of all its pages."""
        ...

    def read(self, page_keys: Sequence[PageKey], out: NDArray[np.uint8]) -> int:
        """Fill `out` with pages; return how many of the first ones are valid."""
        ...


@dataclass(frozen=True)
class ImportReport:
    """Result of an import."""

    num_pages: int
    num_stored: int  # pages of the bundle that the store has now, including those that it had before


def is_bundle(path: str | Path) -> bool:
    """Return whether a file begins like a bundle.

    Raises:
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def export_bundle(source: PageSource, page_keys: Sequence[PageKey], path: str | Path) -> None:
    """Write pages to a file.

    The file gets its name when it is complete. Only its owner can read it, like the files of the store.

    Args:
        page_keys: the pages, with all pages before them in their prompts.

    Raises:
        StoreError: the parent of a page is missing, the pages have several namespaces or were computed with a LoRA
            adapter, or a page cannot be read.
        OSError: the file cannot be written.
    """
    if any(is_adapted(page.namespace) for page in page_keys):
        raise StoreError(
            "pages that were computed with a LoRA adapter are not exported, because a bundle does not name it; export "
            "pages of the model without an adapter"
        )
    ordered, parents = _sort_pages(page_keys)
    identity, path = source.identity, Path(path)
    checksums = [checksum(row.data) for rows in _read_payloads(source, ordered) for row in rows]
    pages = b"".join(
        _PAGE.pack(parent, pack_tokens(page.token_ids), page.generated, digest)
        for parent, page, digest in zip(parents, ordered, checksums, strict=True)
    )
    text = identity.to_json()
    table = _START.pack(_MAGIC, FORMAT_VERSION, len(text), len(ordered)) + text + pages
    unnamed = path.with_name(path.name + ".new")
    try:
        unnamed.unlink(missing_ok=True)  # an existing file would keep its mode
        with open(unnamed, "xb", opener=partial(os.open, mode=0o600)) as file:
            file.write(sealed(table, len(table) + CHECKSUM_BYTES))
            for rows in _read_payloads(source, ordered):
                file.write(rows.data)
            file.flush()
            sync_file(file.fileno())
        os.replace(unnamed, path)
    finally:
        unnamed.unlink(missing_ok=True)


def import_bundle(store: PageStore, path: str | Path, namespace: bytes, *, evicts: bool = True) -> ImportReport:
    """Store the pages of a file in a namespace.

    Args:
        evicts: whether stored pages can be evicted for the new ones; if not, pages without room are left out.

    Raises:
        StoreMismatch: the pages belong to another model, or to another version of radixlm.
        StoreCorrupt: the file is not a bundle, or is damaged; the pages before the damage are stored.
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as file:
        bundle = _Bundle.read(file, Path(path), store.identity)
        page_keys, num_stored = bundle.page_keys(namespace), 0
        for first, rows in bundle.payloads(file):
            num_stored += len(store.put(page_keys[first : first + len(rows)], rows, evicts=evicts).stored)
        return ImportReport(len(page_keys), num_stored)


@dataclass(frozen=True)
class _Bundle:
    """The table of a bundle, after verification."""

    path: Path
    identity: StoreIdentity
    pages: tuple[tuple[int, bytes, bytes, bytes], ...]  # parent, tokens, flags, checksum

    @classmethod
    def read(cls, file: BinaryIO, path: Path, wanted: StoreIdentity) -> _Bundle:
        """Read and verify the table of a bundle with pages of the identity `wanted`.

        Raises:
            StoreMismatch, StoreCorrupt: see `import_bundle`.
        """
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
            raise StoreMismatch(f"{path} is of another model: {_describe_difference(identity, wanted)}")
        expected = table_bytes + num_pages * identity.page_bytes
        if expected != num_bytes:
            raise StoreCorrupt(f"{path} has {num_bytes} bytes, its {num_pages} pages need {expected}; export it again")
        pages = tuple(_PAGE.iter_unpack(table[_START.size + identity_bytes : -CHECKSUM_BYTES]))
        for i, (parent, _, generated, _) in enumerate(pages):
            if not -1 <= parent < i or generated.strip(b"\0\1"):
                raise StoreCorrupt(f"{path} broke: its page {i} has parent {parent}, flags {generated.hex()}")
        return cls(path, identity, pages)

    def page_keys(self, namespace: bytes) -> list[PageKey]:
        """Return the keys of the pages in a namespace."""
        page_keys: list[PageKey] = []
        for parent, tokens, generated, _ in self.pages:
            parent_key = page_keys[parent].key if parent >= 0 else NO_PARENT
            page_keys.append(PageKey.of(self.identity, namespace, parent_key, unpack_tokens(tokens), generated))
        return page_keys

    def payloads(self, file: BinaryIO) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield the payloads in portions, `[N, page_bytes]`, each with the number of its first page."""
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


def _sort_pages(page_keys: Sequence[PageKey]) -> tuple[list[PageKey], list[int]]:
    """Sort pages with parents before children; return them and the index of each page's parent, -1 without one.

    The order depends on the tokens alone.
    """
    if len({page.namespace for page in page_keys}) > 1:
        raise StoreError("pages of several namespaces do not fit into one bundle; export them one by one")
    children: dict[bytes, list[PageKey]] = {}
    for page in {page.key: page for page in page_keys}.values():
        children.setdefault(page.parent_key, []).append(page)
    ordered, number = list[PageKey](), {NO_PARENT: -1}
    waiting = [NO_PARENT]
    for key in waiting:
        for page in sorted(children.get(key, []), key=lambda page: page.token_ids):
            number[page.key] = len(ordered)
            ordered.append(page)
            waiting.append(page.key)
    if len(ordered) != len({page.key for page in page_keys}):
        raise StoreError(f"{len(page_keys)} pages were to be exported, {len(ordered)} have all those before them")
    return ordered, [number[page.parent_key] for page in ordered]


def _read_payloads(source: PageSource, page_keys: Sequence[PageKey]) -> Iterator[NDArray[np.uint8]]:
    """Yield the payloads of pages in portions, `[N, page_bytes]`; a portion is valid until the next.

    Raises:
        StoreError: a page cannot be read.
    """
    page_bytes = source.identity.page_bytes
    at_once = max(1, _BYTES_AT_ONCE // page_bytes)
    out = np.empty((min(at_once, len(page_keys)), page_bytes), np.uint8)
    for first in range(0, len(page_keys), at_once):
        some = page_keys[first : first + at_once]
        num_read = source.read(some, out)
        if num_read < len(some):
            raise StoreError(
                f"page {first + num_read} of {len(page_keys)} cannot be read; `radixlm store verify` says what is wrong"
            )
        yield out[: len(some)]


def _describe_difference(found: StoreIdentity, wanted: StoreIdentity) -> str:
    """Return the part of an error message that names the first field in which two identities differ."""
    ours, theirs = asdict(wanted), asdict(found)
    name = next(name for name in ours if ours[name] != theirs[name])
    return f"its {name} is {theirs[name]!s:.100}, this store's is {ours[name]!s:.100}; export it there again"
