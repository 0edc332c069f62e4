"""Compiled heads draft what transformers' own parts do, the same bits however the rows before were computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from radixlm.compile import compile_model, compiler
from radixlm.compile.compiler import Quantize
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import TOP_LOGITS, KVDType
from radixlm.runtime.errors import EngineError, VerificationFailed
from radixlm.runtime.model.batch import NEVER_DRAFTED, Batch
from radixlm.runtime.model.model_runner import ModelRunner

from ...goldens.families import MTP_FAMILIES
from ...goldens.tiny_outputs import TinyOutputs
from ..ragged import Rows

NUM_FREQUENT = 128
NUM_PAGES, NUM_SLOTS = 61, 16  # pages are a prime, so that Rows can scatter them
# Of the standard deviation of a prompt's logits: a draft is of rounded rows twice.
TOLERANCES: dict[KVDType, float] = {"f32": 1e-4, "f16": 4e-3, "k12v8": 6e-2}
OFTEN = [("qwen3_5-mtp", "f16"), ("qwen3_5-mtp", "k12v8"), ("deepseek_v3-mtp", "f16")]
LONG = [("qwen3_5-mtp", "f32"), ("glm4_moe-mtp", "f32"), ("qwen3_5_moe-mtp", "f16"), ("deepseek_v3-mtp", "f32")]
CASES = [*OFTEN, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]


@pytest.fixture
def artifact(name: str, kv_dtype: KVDType, artifact_of: Callable[..., Artifact]) -> Artifact:
    return artifact_of(name, kv_dtype)


@pytest.fixture
def open_rows(artifact: Artifact) -> Iterator[Callable[[], Rows]]:
    runners: list[ModelRunner] = []

    def opened() -> Rows:
        runners.append(ModelRunner(artifact, num_pages=NUM_PAGES, num_state_slots=NUM_SLOTS))
        return Rows(runners[-1], NUM_PAGES)

    yield opened
    for runner in runners:
        runner.close()


def draft(rows: Rows, positions: dict[int, int], *, is_frequent: bool = False) -> np.ndarray:
    """Drafts behind one token of each of some sequences, at these positions; the rows before them are there."""
    for number, position in positions.items():
        rows.rows[number].num_computed = position
    *arrays, _ = rows._batch(dict.fromkeys(positions, 1)).arrays
    wanted = np.arange(len(positions), dtype=np.int32)
    logits: np.ndarray = rows.runner.draft(Batch(*arrays, wanted), is_frequent=is_frequent)  # type: ignore[attr-defined]
    return logits.copy()


def computed(rows: Rows, ids: list[int], chunks: list[int]) -> int:
    """A sequence of these tokens, all computed in steps of these sizes."""
    number = rows.add(ids)
    for chunk in chunks:
        rows.step({number: chunk})
    assert rows.rows[number].num_computed == len(ids)
    return number


@pytest.mark.parametrize(("name", "kv_dtype"), CASES)
def test_drafts_are_those_of_transformers_parts_and_the_same_bits_in_any_company(
    name: str, kv_dtype: KVDType, open_rows: Callable[[], Rows]
) -> None:
    prompts, rows = TinyOutputs.load(name).prompts, open_rows()
    whole = [computed(rows, prompt.ids, [len(prompt.ids)]) for prompt in prompts]
    cut = [computed(rows, prompt.ids, [1] * 5 + [len(prompt.ids) - 5]) for prompt in prompts]
    for prompt, one, other in zip(prompts, whole, cut, strict=True):
        for place in reversed(range(1, len(prompt.rows))):  # a draft is made of the row before, and leaves its own
            position = int(prompt.rows[place])
            alone = draft(rows, {one: position})
            assert prompt.distance(alone, slice(place, place + 1)) <= TOLERANCES[kv_dtype]
            beside = draft(rows, {other: position, whole[-1]: len(prompts[-1].ids) - 1})
            assert np.array_equal(beside[0], alone[0])


@pytest.mark.parametrize(("name", "kv_dtype"), CASES)
def test_what_a_draft_leaves_is_written_over(name: str, kv_dtype: KVDType, open_rows: Callable[[], Rows]) -> None:
    """A sequence on whose rows wrong tokens were drafted goes on as one without."""
    ids = TinyOutputs.load(name).prompts[-1].ids[:40]
    never, often = open_rows(), open_rows()
    for start in range(20):
        for rows in (never, often):
            if not start:
                rows.add(ids)
                rows.step({0: 20})
        true, wrong = ids, [*ids[: 20 + start], *reversed(ids[20 + start :])]
        often.rows[0].token_ids = wrong
        for depth in range(min(3, 20 - start)):
            draft(often, {0: 20 + start + depth})
        often.rows[0].token_ids = true
        often.rows[0].num_computed = 20 + start
        found = [rows.step({0: 1})[0] for rows in (never, often)]
        assert np.array_equal(*found)
    for rows in (never, often):
        rows.rows[0].token_ids = [*ids, 7]
        rows.rows[0].page_ids.append(3 if 3 not in rows.rows[0].page_ids else 4)
    assert np.array_equal(draft(never, {0: 40}), draft(often, {0: 40}))


@pytest.mark.parametrize("quantize", ["f32", "q8"])
def test_frequent_tokens_are_drafted_with_the_same_logits(
    quantize: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixlm.compile.module._NUM_FREQUENT", NUM_FREQUENT)
    source = MTP_FAMILIES["qwen3_5-mtp"].write(tmp_path / "source")
    path = compile_model(source, tmp_path / "out.radixlm", quantize=quantize, kv_dtype="f16", context_length=512).path
    runner = ModelRunner(Artifact.open(path), num_pages=NUM_PAGES, num_state_slots=NUM_SLOTS)
    assert runner.num_frequent == NUM_FREQUENT
    rows = Rows(runner, NUM_PAGES)
    prompts = TinyOutputs.load("qwen3_5-mtp").prompts
    positions = {computed(rows, prompt.ids, [len(prompt.ids)]): len(prompt.ids) - 1 for prompt in prompts}
    frequent = draft(rows, positions, is_frequent=True)  # first, because both write to one buffer
    whole = draft(rows, positions)
    assert (frequent[:, NUM_FREQUENT:] == NEVER_DRAFTED).all()
    if quantize == "f32":
        assert np.array_equal(frequent[:, :NUM_FREQUENT], whole[:, :NUM_FREQUENT])
    for row, all_logits in zip(frequent, whole, strict=True):
        refined = np.argsort(-all_logits)[: TOP_LOGITS // 2]  # rounded inputs may change the order a little
        likely = refined[refined < NUM_FREQUENT]
        assert likely.size and np.array_equal(row[likely], all_logits[likely])
    assert np.array_equal(draft(rows, positions), whole), "a draft among all tokens is as before"
    runner.close()


def test_a_head_that_drafts_otherwise_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = ModelRunner.draft
    monkeypatch.setattr(ModelRunner, "draft", lambda runner, batch: draft(runner, batch)[:, ::-1])
    source = MTP_FAMILIES["qwen3_5-mtp"].write(tmp_path / "source")
    with pytest.raises(VerificationFailed, match="differ from the NumPy evaluation"):
        compile_model(source, tmp_path / "out.radixlm", quantize="f32", kv_dtype="f16", context_length=512)
    assert not (tmp_path / "out.radixlm").exists()


def _reversed(runner: ModelRunner, drafted: Callable[[], np.ndarray], num_rows: int) -> np.ndarray:
    return drafted()[:, ::-1]


def _not_written(runner: ModelRunner, drafted: Callable[[], np.ndarray], num_rows: int) -> np.ndarray:
    return runner._logits[:num_rows, : runner._num_outputs]


@pytest.mark.parametrize("wrong", [_reversed, _not_written])
def test_a_head_that_drafts_otherwise_among_frequent_tokens_is_not_published(
    wrong: Callable[..., np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = ModelRunner._forward

    def drafts_wrongly(runner: ModelRunner, name: str, batch: Batch, *more: Any) -> np.ndarray:
        if name == "draft_frequent":
            return wrong(runner, lambda: forward(runner, name, batch), batch.shape[3])
        return forward(runner, name, batch, *more)

    monkeypatch.setattr("radixlm.compile.module._NUM_FREQUENT", NUM_FREQUENT)
    monkeypatch.setattr(ModelRunner, "_forward", drafts_wrongly)
    source = MTP_FAMILIES["qwen3_5-mtp"].write(tmp_path / "source")
    with pytest.raises(VerificationFailed, match="differ from the NumPy evaluation"):
        compile_model(source, tmp_path / "out.radixlm", quantize="f32", kv_dtype="f16", context_length=512)
    assert not (tmp_path / "out.radixlm").exists()


def test_the_reference_rounds_what_the_kernels_of_a_head_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_head: set[str] = set()
    check = compiler.check_logits

    def seen(artifact: Artifact, plan: Any, weights: Any, program: Any, rounded: Set[str], done: Any) -> Any:
        before = f"model.layers.{artifact.manifest.model.num_hidden_layers}."
        of_head.update(name.removeprefix(before) for name in rounded if name.startswith(before))
        return check(artifact, plan, weights, program, rounded, done)

    monkeypatch.setattr(compiler, "check_logits", seen)
    source = MTP_FAMILIES["qwen3_5-mtp"].write(tmp_path / "source")
    compile_model(source, tmp_path / "out.radixlm", quantize="q8", kv_dtype="f16", context_length=512)
    assert {"self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight"} <= of_head


def test_a_model_without_a_head_drafts_nothing(artifact_of: Callable[..., Artifact]) -> None:
    artifact = artifact_of("qwen3_5", "f16")
    assert not {"draft", "draft_frequent"}.intersection(artifact.manifest.module.entry_points)
    runner = ModelRunner(artifact, num_pages=4, num_state_slots=2)
    with pytest.raises(EngineError, match="has no MTP head"):
        runner.draft(Batch.of_zeros(0, 1, [0], state_out=1))
    runner.close()
