"""Runs to order: real layouts of keys and values, any bits, and scores with ties."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType, KVLayout
from radixlm.runtime.extras.approximate.records.ordered_layout import key_code_bytes
from radixlm.runtime.extras.approximate.records.ordered_reader import OpenRun
from radixlm.runtime.extras.approximate.records.ordered_run import OrderedRun
from radixlm.runtime.extras.approximate.records.row_records import RowRecords
from radixlm.runtime.model.kv_rows import ROW_DTYPES, KVRows
from radixlm.runtime.store import OSFiles, PageKey, PageStore, StoreIdentity

from ....store.pages import chain

DTYPES: tuple[KVDType, ...] = ("f16", "f32", "k12v8")


@dataclass(frozen=True)
class Run:
    """Pages with their heads, and a score for each token, layer and head."""

    kv: KVLayout
    identity: StoreIdentity
    heads: list[PageKey]
    pages: NDArray[np.uint8]
    scores: NDArray[np.float32]


def kv_of(dtype: KVDType = "f16", *, layers: int = 2, heads: int = 3, head_dim: int = 8) -> KVLayout:
    """A small layout."""
    return KVLayout.uniform(dtype, num_layers=layers, num_kv_heads=heads, head_dim=head_dim)


def identity_of(kv: KVLayout) -> StoreIdentity:
    """Of a model with that layout."""
    layout = msgspec.json.encode(kv, order="sorted").decode()
    return StoreIdentity("model", "tokenizer", "q4", layout, kv.page_bytes)


def run_of(kv: KVLayout, num_pages: int, seed: int = 0, **options: bytes) -> Run:
    """Any bits where tokens are, NaNs too; scores of few values, so that many are equal."""
    rng = np.random.default_rng(seed)
    pages = rng.integers(0, 256, (num_pages, kv.page_bytes), np.uint8)
    if kv.dtype == "k12v8":
        pages = KVRows.of_pages(kv, pages).to_pages()  # zeros in what no token owns
    scores = rng.integers(0, 20, (kv.num_layers, kv.num_kv_heads, num_pages * PAGE_SIZE)).astype(np.float32)
    identity = identity_of(kv)
    return Run(kv, identity, chain(num_pages, seed, identity=identity, **options), pages, scores)  # type: ignore[arg-type]


def open_store(directory: Path, run: Run, files: OSFiles | None = None) -> PageStore:
    """A store with room for a few runs, which knows of them."""
    store = PageStore.open(directory, run.identity, max_bytes=64 << 20, files=files)
    RowRecords.of(store)
    return store


def stored(directory: Path, run: Run, chunk_size: int = 16, num_ranks: int | None = None) -> PageStore:
    """A store that has the pages of a run, and the run."""
    store = open_store(directory, run)
    put_run(store, run, chunk_size=chunk_size, num_ranks=num_ranks)
    return store


def put_run(store: PageStore, run: Run, sign: int = 1, chunk_size: int = 16, num_ranks: int | None = None) -> bool:
    """Put the pages of a run and the run, by its scores or their opposites; whether it is stored."""
    store.put(run.heads, run.pages)
    ordered = OrderedRun.of_pages(run.kv, run.pages, sign * run.scores, num_ranks=num_ranks)
    return bool(RowRecords.of(store).put_ordered(run.heads, ordered, chunk_size=chunk_size).stored)


def opened(store: PageStore, run: Run) -> OpenRun:
    """The run, which has to be there."""
    found = RowRecords.of(store).open_ordered(run.heads)
    assert found is not None
    return found


def all_pages(num_layers: int, num_pages: int) -> NDArray[np.bool_]:
    """That all pages of a run are wanted, in each layer."""
    return np.ones((num_layers, num_pages), np.bool_)


def is_of_pages(found: OpenRun, pages: NDArray[np.uint8]) -> bool:
    """Whether everything can be read of a run; what can is of these pages."""
    kv, ranks = found.layout.kv, found.layout.num_ranks
    first, rows = found.first(ranks), found.page_rows(all_pages(kv.num_layers, len(pages)))
    exact = KVRows.of_pages(kv, pages)
    if first is not None:
        wanted = exact.take(first.tokens.astype(np.int64))
        assert first.rows.to_pages().tobytes() == wanted.to_pages().tobytes()
    assert rows is None or (rows.to_pages() == pages).all()
    return first is not None and rows is not None and found.check() is not None


def num_found(store: PageStore, heads: list[PageKey]) -> int:
    """How many of the first pages are a run."""
    found = RowRecords.of(store).open_ordered(heads)
    if found is None:
        return 0
    found.close()
    return found.header.num_pages


def unpack_keys(kv: KVLayout, packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Keys with their scales as numbers: of uint8 `[..., key_bytes]` float32 `[..., head_dim]`."""
    num_code_bytes = key_code_bytes(kv)
    codes = np.ascontiguousarray(packed[..., :num_code_bytes]).view(ROW_DTYPES[kv.dtype])
    keys: NDArray[np.float32] = codes.astype(np.float32)
    return keys * np.ascontiguousarray(packed[..., num_code_bytes:]).view(np.float32) if kv.has_codes else keys
