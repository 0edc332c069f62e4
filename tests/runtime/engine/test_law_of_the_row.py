"""Law of the row: a token's logits depend on its own sequence and nothing else, bit for bit.

Not on how the prompt was cut into forwards, not on what else was in them, not on where its pages lie or how wide the
page table is, not on whether its prefix was computed or copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.model.batch import Batch, PageCopy
from radixlm.runtime.model.model_runner import ModelRunner
from radixlm.tokenizer_fix import Tokenizer

from ...conftest import CompileOnce
from ...goldens.tiny_models import TINY_MODELS

NUM_PAGES = 64
NUM_TOKENS = 150  # of the row that is watched: the last page is partial
TEXT = """The law of the row says that what a model answers to you must not depend on whom else it answers at the
same time. Sums of floating point numbers depend on their order, and the order usually depends on the batch: a kernel
for one row adds differently from a kernel for many, a split over threads adds differently from one thread. Then a
reply that came from a cache is not the reply that would have been computed, and nobody can tell which of the two is
right. Here every sum has one order, decided by absolute positions, so that a cached prefix, a chunk of a prompt and a
token in a crowd of others are the same bits. It costs little: integer products are exact in any order, and softmax is
merged span by span in the order of the text, whether the spans were computed by one processor or by several of them."""


@dataclass
class Row:
    """A sequence and the pages that hold its KV."""

    token_ids: np.ndarray
    page_ids: Sequence[int]
    num_computed: int = 0


@dataclass
class Model:
    """A runner whose logits of every token are wanted."""

    runner: ModelRunner
    token_ids: np.ndarray  # of the watched row
    vocab_size: int

    def step(self, chunks: Sequence[tuple[Row, int]], *, extra_pages: int = 0) -> list[np.ndarray]:
        """Compute the next `count` tokens of each row in one forward; return their logits, `[count, vocab]` each.

        Asks for 64 rows of logits at a time: the forward is repeated, and writes the same KV again.
        """
        positions = [np.arange(row.num_computed, row.num_computed + count) for row, count in chunks]
        table = np.zeros((len(chunks), max(len(row.page_ids) for row, _ in chunks) + extra_pages), np.int32)
        for i, (row, _) in enumerate(chunks):
            table[i, : len(row.page_ids)] = row.page_ids
        pages = [table[i, where // PAGE_SIZE] for i, where in enumerate(positions)]
        joined = np.concatenate(positions).astype(np.int32)
        logits = [
            self.runner.forward(
                Batch(
                    token_ids=np.concatenate(
                        [row.token_ids[where] for (row, _), where in zip(chunks, positions, strict=True)]
                    ).astype(np.int32),
                    positions=joined,
                    slots=(np.concatenate(pages) * PAGE_SIZE + joined % PAGE_SIZE).astype(np.int32),
                    row_of_token=np.repeat(np.arange(len(chunks)), [count for _, count in chunks]).astype(np.int32),
                    page_table=table,
                    kv_lengths=joined + np.int32(1),
                    logit_rows=np.arange(start, min(start + 64, len(joined)), dtype=np.int32),
                )
            ).copy()
            for start in range(0, len(joined), 64)
        ]
        for row, count in chunks:
            row.num_computed += count
        ends = np.cumsum([count for _, count in chunks])
        return np.split(np.concatenate(logits), ends[:-1])

    def row(self, page_ids: Sequence[int] | None = None) -> Row:
        """The watched row, nothing of it computed."""
        return Row(self.token_ids, page_ids or range(-(-NUM_TOKENS // PAGE_SIZE)))

    def in_chunks(self, row: Row, counts: Sequence[int]) -> np.ndarray:
        """All logits of a row, computed in forwards of so many tokens."""
        return np.concatenate([self.step([(row, count)])[0] for count in counts])


@pytest.fixture(scope="module")
def odd_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with odd sizes and a bias."""
    return TINY_MODELS["qwen2"].write(tmp_path_factory.mktemp("law") / "odd")


@pytest.fixture(scope="module")
def odd_artifact(odd_source: Path, compile_once: CompileOnce) -> Path:
    """Its weights in 4 bits."""
    return compile_once(odd_source, quantize="q4")


@pytest.fixture(scope="module")
def odd_codes_artifact(odd_source: Path, compile_once: CompileOnce) -> Path:
    """The same with attention in integers."""
    return compile_once(odd_source, "k12v8", quantize="q4")


@pytest.fixture(scope="module")
def odd_f32_artifact(odd_source: Path, compile_once: CompileOnce) -> Path:
    """The same with weights and KV in float32: nothing is rounded, and float sums have an order of their own."""
    return compile_once(odd_source, "f32", quantize="keep")


@pytest.fixture(scope="module")
def gemma4_artifact(family_artifact: Callable[..., Path]) -> Path:
    """Layers of two shapes, of which some read the KV of others, windows, and embeddings for each layer."""
    return family_artifact("gemma4", "q4", "auto")


@pytest.fixture(scope="module")
def gemma4_moe_artifact(family_artifact: Callable[..., Path]) -> Path:
    """Experts beside a dense layer, values that are keys, and attention in integers."""
    return family_artifact("gemma4-moe", "q8", "k12v8")


_TINY = ["odd", "odd_codes", "odd_f32", "gemma4", "gemma4_moe"]


@pytest.fixture(scope="module", params=["smollm2", *_TINY, "smollm2_codes"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    artifact = Artifact.open(request.getfixturevalue(f"{request.param}_artifact"))
    runner = ModelRunner(artifact, num_pages=NUM_PAGES)
    token_ids = np.array(Tokenizer(artifact.tokenizer_json).encode(TEXT), np.int32)[:NUM_TOKENS]
    assert len(token_ids) == NUM_TOKENS
    yield Model(runner, token_ids, artifact.manifest.model.vocab_size)
    runner.close()


@pytest.fixture(scope="module")
def cold(model: Model) -> np.ndarray:
    """Logits of every token, prefilled at once."""
    return model.in_chunks(model.row(), [NUM_TOKENS])


def test_random_chunks_change_nothing(model: Model, cold: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    for _ in range(3):
        cuts = np.sort(rng.choice(np.arange(1, NUM_TOKENS), 6, replace=False))
        counts = np.diff([0, *cuts, NUM_TOKENS]).tolist()
        assert (model.in_chunks(model.row(), counts) == cold).all(), counts


def test_one_token_at_a_time_changes_nothing(model: Model, cold: np.ndarray) -> None:
    assert (model.in_chunks(model.row(), [1] * NUM_TOKENS) == cold).all()


def test_company_changes_nothing(model: Model, cold: np.ndarray) -> None:
    """Others are prefilled and decoded in the same forwards, before and behind the watched row."""
    rng = np.random.default_rng(1)
    others = [Row(rng.integers(0, model.vocab_size, 200), range(start, start + 13)) for start in (20, 33, 46)]
    watched, found = model.row(), []
    while watched.num_computed < NUM_TOKENS:
        mine = min(int(rng.choice([1, 2, 17, 40])), NUM_TOKENS - watched.num_computed)
        company = [(other, int(rng.integers(1, 9))) for other in others if other.num_computed < 190]
        where = int(rng.integers(0, len(company) + 1))
        company.insert(where, (watched, mine))
        found.append(model.step(company)[where])
    assert (np.concatenate(found) == cold).all()


def test_wider_page_tables_change_nothing(model: Model, cold: np.ndarray) -> None:
    for extra_pages in (1, 7, 20):  # more than 16 pages are two spans
        row = model.row()
        assert (model.step([(row, 100)], extra_pages=extra_pages)[0] == cold[:100]).all()
        for position in range(100, 104):
            assert (model.step([(row, 1)], extra_pages=extra_pages)[0] == cold[position]).all()


def test_other_pages_change_nothing(model: Model, cold: np.ndarray) -> None:
    pages = np.random.default_rng(2).permutation(NUM_PAGES)[: -(-NUM_TOKENS // PAGE_SIZE)].tolist()
    assert (model.in_chunks(model.row(pages), [70, 1, NUM_TOKENS - 71]) == cold).all()


def test_a_prefix_shared_and_copied_changes_nothing(model: Model, cold: np.ndarray) -> None:
    """Whole pages of another sequence are reused as they are, the rows of a partial one copied."""
    model.in_chunks(model.row(), [NUM_TOKENS])
    for cached in (5, 32, 75, 149):
        full, rest = divmod(cached, PAGE_SIZE)
        pages = [*range(full), *range(30, 40 - full)]
        model.runner.copy_rows([PageCopy(full, 30, rest)])
        row = Row(model.token_ids, pages, num_computed=cached)
        assert (model.in_chunks(row, [NUM_TOKENS - cached]) == cold[cached:]).all()


def test_what_a_page_held_before_changes_nothing(model: Model, cold: np.ndarray) -> None:
    garbage = Row(np.random.default_rng(3).integers(0, model.vocab_size, 160), range(10))
    model.in_chunks(garbage, [160])
    assert (model.in_chunks(model.row(), [33, NUM_TOKENS - 33]) == cold).all()
