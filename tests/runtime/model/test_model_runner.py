"""A batch that does not fit the module or the pool is refused before anything is written."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace
from radixlm.runtime.artifact import Artifact, write_manifest
from radixlm.runtime.artifact.manifest import PAGE_SIZE, WEIGHT_BLOCK, KVDType
from radixlm.runtime.engine.step.sampler_state import relative_weights
from radixlm.runtime.errors import CorruptArtifact, EngineError, InvalidParameter
from radixlm.runtime.model.batch import Batch, BatchArrays, PageCopy
from radixlm.runtime.model.model_runner import ModelRunner

from ...conftest import CompileOnce
from ..fake_model import top_of

SMAPS = Path("/proc/self/smaps")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
NUM_PAGES = 4
VOCAB_SIZE = 320


@pytest.fixture(scope="module")
def runner(tiny_artifact: Path) -> Iterator[ModelRunner]:
    runner = ModelRunner(Artifact.open(tiny_artifact), num_pages=NUM_PAGES, num_threads=1)
    yield runner
    runner.close()


FIELDS = [*BatchArrays.__annotations__]


def batch(num_tokens: int = 3, start: int = 0) -> Batch:
    """Tokens `[start, start + num_tokens)` of one sequence on pages 2 and 1; logits of the last one."""
    positions = np.arange(start, start + num_tokens, dtype=np.int32)
    pages = np.array([2, 1], np.int32)
    return Batch(
        token_ids=positions + np.int32(7),
        positions=positions,
        slots=pages[positions // PAGE_SIZE] * np.int32(PAGE_SIZE) + positions % np.int32(PAGE_SIZE),
        row_of_token=np.zeros(num_tokens, np.int32),
        page_table=pages[None],
        kv_lengths=positions + np.int32(1),
        logit_rows=np.array([num_tokens - 1], np.int32),
    )


def changed(batch: Batch, **arrays: Any) -> Batch:
    return Batch(**(dict(zip(FIELDS, batch.arrays, strict=True)) | arrays))


def test_a_sequence_in_two_steps_has_the_logits_of_one_step(runner: ModelRunner) -> None:
    whole = runner.forward(batch(20)).copy()
    runner.forward(batch(18))
    assert np.array_equal(runner.forward(batch(2, start=18)), whole)
    assert whole.shape == (1, VOCAB_SIZE)
    assert np.isfinite(whole).all()


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("token_ids", 0, VOCAB_SIZE),
        ("positions", 0, 1 << 30),
        ("slots", 0, NUM_PAGES * PAGE_SIZE),
        ("row_of_token", 0, 1),
        ("page_table", 0, NUM_PAGES),
        ("kv_lengths", 1, 2 * PAGE_SIZE + 1),
        ("logit_rows", 0, 3),
    ],
)
def test_a_value_outside_its_range_is_refused_and_nothing_is_written(
    runner: ModelRunner, field: str, low: int, high: int
) -> None:
    expected = runner.forward(batch(4)).copy()
    runner.forward(batch(3))
    for wrong in (low - 1, high, -(1 << 31), (1 << 31) - 1):
        spoiled = getattr(batch(3).arrays, field).copy()
        spoiled.flat[-1] = wrong
        with pytest.raises(EngineError, match=rf"{field} holds .*must be in {low}\.\.{high - 1}"):
            runner.forward(changed(batch(3), **{field: spoiled}))
    assert np.array_equal(runner.forward(batch(1, start=3)), expected)  # it sees the KV of the other three


@pytest.mark.parametrize("field", FIELDS)
def test_an_array_of_another_type_or_rank_is_refused(runner: ModelRunner, field: str) -> None:
    good: npt.NDArray[np.int32] = getattr(batch(4).arrays, field)
    wrongs = [good.astype(np.int64), good.astype(np.float32), good.astype(">i4"), good[..., None]]
    for wrong in [*wrongs, good.ravel()[0]]:
        with pytest.raises(EngineError, match=field):
            runner.forward(changed(batch(4), **{field: wrong}))


@pytest.mark.parametrize("field", ["positions", "slots", "row_of_token", "kv_lengths"])
def test_arrays_of_unequal_length_are_refused(runner: ModelRunner, field: str) -> None:
    for length in (2, 4):
        wrong = np.resize(getattr(batch(3).arrays, field), length)
        with pytest.raises(EngineError, match=rf"{field} is int32 \({length},\); .* \(3,\) is needed"):
            runner.forward(changed(batch(3), **{field: wrong}))


def test_a_step_without_tokens_or_with_too_many_is_refused(runner: ModelRunner) -> None:
    for num_tokens in (0, 513):
        arrays = [np.zeros(num_tokens, np.int32)] * 4
        with pytest.raises(EngineError, match=f"{num_tokens} tokens"):
            runner.forward(Batch(*arrays, np.zeros((1, 1), np.int32), arrays[0], np.zeros(1, np.int32)))
    with pytest.raises(EngineError, match="65 logits"):
        runner.forward(changed(batch(3), logit_rows=np.zeros(65, np.int32)))


def test_a_page_table_without_rows_or_beyond_the_context_is_refused(runner: ModelRunner) -> None:
    for shape in ((0, 2), (1, 0), (1, 512 // PAGE_SIZE + 1)):
        with pytest.raises(EngineError):
            runner.forward(changed(batch(3), page_table=np.zeros(shape, np.int32)))


@pytest.mark.parametrize(
    "copy", [PageCopy(-1, 0, 1), PageCopy(0, NUM_PAGES, 1), PageCopy(0, 1, 17), PageCopy(0, 1, -1)]
)
def test_a_copy_outside_the_pool_is_refused(runner: ModelRunner, copy: PageCopy) -> None:
    with pytest.raises(EngineError, match="outside the pool"):
        runner.copy_rows([copy])


def test_copied_rows_are_read_like_computed_ones(runner: ModelRunner) -> None:
    expected = runner.forward(batch(4)).copy()
    runner.copy_rows([PageCopy(2, 3, 3), PageCopy(3, 0, 3)])
    moved = np.array([[0, 1]], np.int32)
    last = changed(batch(1, start=3), page_table=moved, slots=np.array([3], np.int32))
    assert np.array_equal(runner.forward(last), expected)


@pytest.mark.parametrize("kv_dtype", ["f16", "f32", "k12v8"])
def test_pages_that_were_read_out_and_written_elsewhere_are_the_same_bits(
    tiny_source: Path, compile_once: CompileOnce, kv_dtype: KVDType
) -> None:
    compiled = Artifact.open(compile_once(tiny_source, kv_dtype, quantize="q4"))
    runner = ModelRunner(compiled, num_pages=NUM_PAGES, num_threads=1)
    expected = runner.forward(batch(20)).copy()
    pages = np.zeros((3, compiled.manifest.kv.page_bytes), np.uint8)
    runner.read_pages([2, 1], pages)
    assert pages[0].any() and pages[1].any() and not pages[2].any()
    runner.write_pages([3, 0], pages[:2])
    again = np.zeros_like(pages)
    runner.read_pages([0, 3], again)
    assert np.array_equal(again[:2], pages[1::-1])
    moved = np.array([[3, 0]], np.int32)
    last = changed(batch(1, start=19), page_table=moved, slots=np.array([3], np.int32))
    assert np.array_equal(runner.forward(last), expected)
    runner.close()


def test_pages_outside_the_pool_or_of_another_shape_are_refused(runner: ModelRunner, tiny_artifact: Path) -> None:
    page_bytes = Artifact.open(tiny_artifact).manifest.kv.page_bytes
    pages = np.zeros((2, page_bytes), np.uint8)
    for page in (-1, NUM_PAGES):
        with pytest.raises(EngineError, match="outside the pool"):
            runner.write_pages([0, page], pages)
        with pytest.raises(EngineError, match="outside the pool"):
            runner.read_pages([page], pages)
    for wrong in (pages[:1], pages[:, :-1], pages.view(np.float16), pages[:, ::2]):
        with pytest.raises(EngineError, match=r"is needed"):
            runner.write_pages([0, 1], wrong)
    with pytest.raises(EngineError, match=r"is needed"):
        runner.read_pages([0, 1, 2], pages)


@pytest.mark.parametrize("num_pages", [0, -1])
def test_a_pool_without_pages_is_refused(tiny_artifact: Path, num_pages: int) -> None:
    with pytest.raises(InvalidParameter, match="num_pages"):
        ModelRunner(Artifact.open(tiny_artifact), num_pages=num_pages)


@pytest.mark.parametrize("num_pages", [1 << 40, 1 << 62, 1 << 80])
def test_a_pool_beyond_memory_is_an_error_that_says_what_to_lower(tiny_artifact: Path, num_pages: int) -> None:
    with pytest.raises(EngineError, match="--kv-cache-gb"):
        ModelRunner(Artifact.open(tiny_artifact), num_pages=num_pages)


def test_a_library_that_is_none_cannot_be_loaded(tiny_artifact: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_artifact, tmp_path / "copy.radixlm"))
    artifact = Artifact.open(copy)
    for data in (b"", b"\x7fELF", b"no library"):
        (copy / "model.so").unlink()  # not the mapped inode of another test
        (copy / "model.so").write_bytes(data)
        with pytest.raises(CorruptArtifact, match=r"model\.so cannot be loaded") as caught:
            ModelRunner(artifact, num_pages=1)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, VOCAB_SIZE])
def test_top_logits_are_those_of_the_last_forward(runner: ModelRunner, vocab_size: int) -> None:
    rows = np.array([2, 0, 3], np.int32)
    logits = runner.forward(changed(batch(4), logit_rows=rows))[:, :vocab_size]
    expected, top = top_of(logits), runner.top_logits(3, vocab_size)
    assert all((found == wanted).all() for found, wanted in zip(top[:3], expected[:3], strict=True))


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 257, VOCAB_SIZE])
def test_running_sums_are_those_of_a_row_at_a_temperature(runner: ModelRunner, vocab_size: int) -> None:
    logits = runner.forward(changed(batch(4), logit_rows=np.array([2, 0, 3], np.int32)))[:, :vocab_size]
    top = runner.top_logits(3, vocab_size)
    assert top.running_sums is not None
    for row, temperature in ((2, 1.0), (0, 0.3), (1, 50.0), (0, 1.0)):
        running = np.cumsum(relative_weights(logits[row], temperature))
        expected = [running[min(end, vocab_size) - 1] for end in range(WEIGHT_BLOCK, vocab_size + 256, WEIGHT_BLOCK)]
        assert top.running_sums(row, temperature) == pytest.approx(np.array(expected), rel=1e-11)
        one = top.one(row)
        assert one.running_sums is not None
        assert np.array_equal(one.running_sums(0, temperature), top.running_sums(row, temperature))
    with pytest.raises(Exception, match="row is out of range"):
        top.running_sums(64, 1.0)


def test_an_artifact_whose_module_adds_no_weights_opens(tiny_artifact: Path, tmp_path: Path) -> None:
    """It was compiled by an older version; the sampler computes all weights of a row itself."""
    copy = Path(shutil.copytree(tiny_artifact, tmp_path / "copy.radixlm"))
    manifest = Artifact.open(copy).manifest
    names = tuple(name for name in manifest.module.entry_points if name != "weight_sums")
    write_manifest(copy, replace(manifest, module=replace(manifest.module, entry_points=names)))
    older = ModelRunner(Artifact.open(copy), num_pages=NUM_PAGES, num_threads=1)
    older.forward(batch())
    assert older.top_logits(1, VOCAB_SIZE).running_sums is None
    older.close()


def test_top_logits_say_which_rows_are_not_finite(runner: ModelRunner) -> None:
    logits = runner.forward(changed(batch(4), logit_rows=np.array([0, 1, 2], np.int32)))
    logits[1, VOCAB_SIZE - 1] = np.nan
    assert runner.top_logits(3, VOCAB_SIZE).is_finite.tolist() == [1, 0, 1]
    assert runner.top_logits(3, VOCAB_SIZE - 1).is_finite.tolist() == [1, 1, 1]


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(65, 10), (-1, 10), (1, 0), (1, VOCAB_SIZE + 1)])
def test_top_logits_of_what_is_not_there_are_refused(runner: ModelRunner, num_rows: int, vocab_size: int) -> None:
    with pytest.raises(EngineError, match="logits"):
        runner.top_logits(num_rows, vocab_size)


def test_batches_of_more_shapes_than_are_kept_are_computed_alike(runner: ModelRunner) -> None:
    expected = runner.forward(batch(3)).copy()
    for num_tokens in range(1, 33):
        for num_rows in range(10):
            runner.forward(changed(batch(num_tokens), logit_rows=np.zeros(num_rows, np.int32)))
    assert np.array_equal(runner.forward(batch(3)), expected)


def test_the_weights_are_mapped_before_they_are_used(smollm2_artifact: Path) -> None:
    artifact = Artifact.open(smollm2_artifact)
    runner = ModelRunner(artifact, num_pages=NUM_PAGES)
    for thread in threading.enumerate():
        if thread.name == "radixlm-weights":
            thread.join()
    [(mapped, flags)] = re.findall(
        rf"{re.escape(str(artifact.weights_path.resolve()))}\n.*?\nRss: +(\d+) kB.*?\nVmFlags: ([a-z ]+)",
        SMAPS.read_text(),
        re.DOTALL,
    )
    assert int(mapped) * 1024 >= artifact.manifest.module.weights_bytes
    assert "hg" in flags.split() or not HUGE_PAGES.exists()  # wanted in huge pages
    runner.close()


def test_a_step_of_zeros_is_a_step_like_any(runner: ModelRunner) -> None:
    zeros = changed(batch(), token_ids=np.zeros(3, np.int32))
    expected = runner.forward(zeros).copy()
    made = Batch.of_zeros(0, 3, [2, 1], wants_logits=True)
    assert np.array_equal(runner.forward(made), expected)
    runner.forward(Batch.of_zeros(0, 2, [2, 1]))
    last = Batch.of_zeros(2, 3, [2, 1], wants_logits=True)
    assert np.array_equal(runner.forward(last), expected)
