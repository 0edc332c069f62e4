"""`compile_model` from end to end on tiny random models: the last stage compares each with NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from radixlm.compile import Progress, compile_model
from radixlm.compile.codegen.targets import Target
from radixlm.compile.verification import NUM_DECODED
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.errors import InvalidParameter, VerificationFailed
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

from .conftest import TinyModel
from .kernels.harness import every_target

MakeTiny = Callable[..., TinyModel]
Write = Callable[..., Path]


@pytest.mark.parametrize(
    "type_", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1], ids=lambda t: t.name
)
def test_keep_stores_gguf_numbers_as_they_are(
    make_tiny: MakeTiny, write_gguf: Write, tmp_path: Path, type_: Type
) -> None:
    report = compile_model(write_gguf(make_tiny(), type_), tmp_path / "tiny.radixlm")
    kinds = report.manifest.quantization.kinds
    assert [kind.source for kind in kinds.values()] == [(type_.name,)]
    assert all(kind.relative_error == 0 for kind in kinds.values())


@pytest.mark.parametrize("type_", [Type.Q5_0, Type.Q5_1], ids=lambda t: t.name)
def test_five_bits_stay_five(make_tiny: MakeTiny, write_gguf: Write, tmp_path: Path, type_: Type) -> None:
    report = compile_model(write_gguf(make_tiny(), type_), tmp_path / "tiny.radixlm")
    (kind,) = report.manifest.quantization.kinds.items()
    assert kind[0].startswith("q5_g32") and kind[1].relative_error == 0


@pytest.mark.parametrize(("quantize", "kind"), [("q4", "q4_g32"), ("q8", "q8_g32"), ("f16", "f16"), ("f32", "f32")])
def test_hugging_face_weights_round_to_what_is_asked_for(
    make_tiny: MakeTiny, write_huggingface: Write, tmp_path: Path, quantize: Any, kind: str
) -> None:
    report = compile_model(
        write_huggingface(make_tiny(), ml_dtypes.bfloat16), tmp_path / "tiny.radixlm", quantize=quantize
    )
    kinds = report.manifest.quantization.kinds
    assert kind in kinds
    assert set(kinds) == ({"q4_g32", "q8_g32"} if quantize == "q4" else {kind})  # as q4, the embedding has 8 bits
    assert (kinds[kind].relative_error == 0) == (quantize in ("f16", "f32"))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_rows_that_fill_no_group_stay_in_float16(
    make_tiny: MakeTiny, write_huggingface: Write, tmp_path: Path, architecture: str
) -> None:
    tiny = make_tiny(architecture=architecture, attention_bias=architecture == "qwen2", intermediate_size=88)
    report = compile_model(write_huggingface(tiny), tmp_path / "tiny.radixlm", quantize="q4")
    assert report.manifest.quantization.kinds["f16"].count == tiny.config.num_hidden_layers  # down_proj


@every_target
def test_every_target_that_this_machine_runs_agrees_with_numpy(
    make_tiny: MakeTiny, write_gguf: Write, tmp_path: Path, target: Target
) -> None:
    report = compile_model(write_gguf(make_tiny(), Type.Q4_1), tmp_path / "tiny.radixlm", target=target.name)
    assert report.manifest.target.name == target.name


def test_a_context_beyond_the_models_own_is_refused(make_tiny: MakeTiny, write_gguf: Write, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"129 is not in 16\.\.128"):
        compile_model(write_gguf(make_tiny()), tmp_path / "tiny.radixlm", context_length=129)
    assert not list(tmp_path.glob("*.radixlm*"))


def test_a_sliding_window_does_not_bound_the_context(
    make_tiny: MakeTiny, write_huggingface: Write, tmp_path: Path
) -> None:
    source = write_huggingface(
        make_tiny(), architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=24
    )
    report = compile_model(source, tmp_path / "tiny.radixlm", quantize="f32")
    assert report.manifest.context_length == 128
    assert report.verification.num_tokens == 51  # two windows, and one token more that is decoded than fits


def test_an_artifact_that_disagrees_is_not_published(
    make_tiny: MakeTiny, write_gguf: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packing that loses the last output of each matrix must not pass as rounding."""
    from radixlm.compile import weights_file

    def damaged(weight: Any) -> Any:
        packed = real(weight)
        packed.codes[-1] = 0
        return packed

    real = weights_file.pack
    monkeypatch.setattr(weights_file, "pack", damaged)
    with pytest.raises(VerificationFailed, match="nothing was published"):
        compile_model(write_gguf(make_tiny()), tmp_path / "tiny.radixlm")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_new_artifact_replaces_the_old_one(make_tiny: MakeTiny, write_gguf: Write, tmp_path: Path) -> None:
    source, output = write_gguf(make_tiny()), tmp_path / "tiny.radixlm"
    compile_model(source, output, kv_dtype="f16")
    compile_model(source, output, kv_dtype="f32")
    assert Artifact.open(output).manifest.kv.dtype == "f32"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.gguf", "tiny.radixlm"]


def test_what_is_no_artifact_is_not_replaced(make_tiny: MakeTiny, write_gguf: Write, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with pytest.raises(InvalidParameter, match="is no artifact"):
        compile_model(write_gguf(make_tiny()), tmp_path / "notes")


def test_progress_names_each_stage_once_and_ends_full(make_tiny: MakeTiny, write_gguf: Write, tmp_path: Path) -> None:
    seen: list[Progress] = []
    compile_model(write_gguf(make_tiny()), tmp_path / "tiny.radixlm", progress=seen.append)
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == ["read", "build", "weights", "verify", "publish"]
    for stage in stages:
        last = [progress for progress in seen if progress.stage == stage][-1]
        assert last.done == last.total


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_bar_of_verify_is_full_only_when_the_artifact_has_run(
    make_tiny: MakeTiny, write_gguf: Write, tmp_path: Path, architecture: str
) -> None:
    """It was with the last tensor that was read, and where layers have biases long before: ten seconds of a model."""
    tiny = make_tiny(architecture=architecture, attention_bias=architecture == "qwen2")
    seen: list[Progress] = []
    compile_model(write_gguf(tiny), tmp_path / "tiny.radixlm", progress=seen.append)
    bars = [progress.done / progress.total for progress in seen if progress.stage == "verify"]
    assert bars == sorted(bars) and bars[-1] == 1.0
    num_steps = 1 + NUM_DECODED
    assert max(bars[:-num_steps]) < 1.0 and len(set(bars[-num_steps:])) == num_steps


def test_a_broken_chat_template_is_told_while_compiling_and_leaves_completions(
    make_tiny: MakeTiny, write_huggingface: Write, tmp_path: Path
) -> None:
    source = write_huggingface(make_tiny(), np.float32)
    (source / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}")
    report = compile_model(source, tmp_path / "tiny.radixlm")
    assert report.template_fault is not None and "not valid Jinja" in report.template_fault
    with Engine(report.path, kv_cache_bytes=1 << 20, max_num_seqs=1, num_threads=1) as engine:
        client = TestClient(create_app(engine))
        completion = client.post("/v1/completions", json={"prompt": "the", "max_tokens": 1})
        chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "the"}]})
    assert (completion.status_code, chat.status_code) == (200, 400)
    assert "not valid Jinja" in chat.json()["error"]["message"]


def test_a_template_that_can_be_used_is_no_fault(make_tiny: MakeTiny, write_gguf: Write, tmp_path: Path) -> None:
    assert compile_model(write_gguf(make_tiny()), tmp_path / "tiny.radixlm").template_fault is None
