"""`radixlm inspect` of what can be compiled: the numbers are those of the artifact that comes of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from radixlm.cli.main import cli
from radixlm.compile import inspection
from radixlm.compile.codegen.targets import find_target
from radixlm.compile.kv_layout import kv_layout
from radixlm.compile.sources import open_source
from radixlm.runtime.artifact import Artifact

from ..compile.families.quantized_families import write_quantized
from ..goldens.families import FAMILIES


def test_it_says_what_the_artifact_takes(runner: CliRunner, tiny_source: Path, tiny_artifact: Path) -> None:
    result = runner.invoke(cli, ["inspect", str(tiny_source), "--quantize", "q4", "--json"])
    assert result.exit_code == 0, result.output
    found, manifest = json.loads(result.output), Artifact.open(tiny_artifact).manifest
    assert found["refusal"] is None
    assert found["context_length"] == manifest.context_length
    assert found["kv_bytes"] == manifest.kv.page_bytes * 1000 // 16
    rope_bytes = 64 * len(manifest.model.ropes)  # frequencies, which no source stores
    assert manifest.module.weights_bytes - rope_bytes == found["artifact_bytes"]
    assert found["file_bytes"] == (tiny_source / "model.safetensors").stat().st_size
    numbers = found["num_parameters"]
    assert found["file_token_bytes"] == 4 * numbers > found["artifact_token_bytes"] > numbers // 2


def test_the_table_says_whether_it_can_be_compiled(runner: CliRunner, tiny_source: Path) -> None:
    result = runner.invoke(cli, ["inspect", str(tiny_source)])
    assert result.exit_code == 0, result.output
    rows = dict(line.split("  ", 1) for line in result.output.splitlines())
    assert rows["can be compiled"].strip() == "yes"
    assert "times the file's" in rows["read per decoded token"]
    usual = "temperature 0.8, top-p 0.95, top-k 40, min-p 0.05, repetition-penalty 1"
    assert rows["sampling"].strip() == f"{usual}, unless a request sets them"


@pytest.mark.parametrize(("drops", "says"), [((), "yes"), (("chat_template",), "no: it has no chat template")])
def test_the_table_says_whether_it_takes_conversations(
    runner: CliRunner, tiny_source: Path, tmp_path: Path, drops: tuple[str, ...], says: str
) -> None:
    source = Path(shutil.copytree(tiny_source, tmp_path / "source"))
    settings = json.loads((source / "tokenizer_config.json").read_text("utf-8"))
    kept = {name: value for name, value in settings.items() if name not in drops}
    (source / "tokenizer_config.json").write_text(json.dumps(kept), "utf-8")
    result = runner.invoke(cli, ["inspect", str(source)])
    [row] = [line for line in result.output.splitlines() if line.startswith("conversations ")]
    assert row.split("  ", 1)[1].strip().startswith(says)


def test_an_artifact_says_the_same_of_what_a_token_reads(
    runner: CliRunner, tiny_source: Path, tiny_artifact: Path
) -> None:
    source = runner.invoke(cli, ["inspect", str(tiny_source), "--quantize", "q4"])
    artifact = runner.invoke(cli, ["inspect", str(tiny_artifact)])
    expected, said = (
        next(line.split("  ", 1)[1].strip() for line in result.output.splitlines() if line.startswith("read per"))
        for result in (source, artifact)
    )
    assert expected == f"{said}, and the KV of earlier tokens"


def test_what_no_kernel_computes_is_named_with_exit_code_2(
    runner: CliRunner, tiny_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from radixlm.compile.ops import implemented

    monkeypatch.setitem(implemented.MODEL, "an odd number of layers", lambda model: len(model.layers) % 2 == 1)
    result = runner.invoke(cli, ["inspect", str(tiny_source)])
    assert result.exit_code == 2
    assert "llama needs an odd number of layers, which no kernel computes yet" in result.output
    assert "parameters" in result.output  # the rest is told all the same


def test_what_cannot_be_read_is_one_line_with_exit_code_2(runner: CliRunner, tiny_source: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_source, tmp_path / "source"))
    os.truncate(source / "model.safetensors", 5000)
    before = sorted(tmp_path.rglob("*"))
    for path in (source, tmp_path / "nowhere.gguf"):
        result = runner.invoke(cli, ["inspect", str(path)])
        assert (result.exit_code, result.output.count("\n")) == (2, 1), result.output
        assert result.output.startswith("Error: ")
    assert sorted(tmp_path.rglob("*")) == before  # nothing is written


def test_of_the_hub_only_the_configuration_is_fetched(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_bytes((tiny_source / "config.json").read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 123}}')
    asked: list[tuple[str, ...]] = []

    def download_files(reference: str, files: tuple[str, ...]) -> Path:
        asked.append(files)
        return tmp_path

    monkeypatch.setattr(inspection.hub, "download_files", download_files)
    found = inspection.inspect_source("hf:org/tiny")
    assert len(asked) == 1 and not any("model" in name and name.endswith("safetensors") for name in asked[0])
    assert (found.refusal, found.file_bytes, found.artifact_bytes) == (None, 123, None)
    with open_source(tiny_source) as source:
        assert found.model == source.config
        assert found.kv_bytes == kv_layout(source.config, "auto", find_target("native")).page_bytes * 1000 // 16


@pytest.mark.parametrize(
    ("file", "settings", "says"),
    [
        ("config.json", {"quant_method": "bitsandbytes", "load_in_4bit": True}, "by bitsandbytes are not read"),
        ("config.json", {"quant_method": "quip"}, "weights quantized by quip are not read"),
        ("quantize_config.json", {"bits": 5, "group_size": 32}, "bits of the quantization is 5"),
        ("mlc-chat-config.json", "q3f16_1", "MLC's quantization q3f16_1 is not read"),
        ("mlc-chat-config.json", "q4f16_1", None),
    ],
)
def test_of_the_hub_what_is_not_read_is_refused_before_it_is_downloaded(
    file: str,
    settings: Any,
    says: str | None,
    runner: CliRunner,
    tiny_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = json.loads((tiny_source / "config.json").read_text())
    written = {"config.json": config, file: settings}
    if file == "config.json":
        written = {file: config | {"quantization_config": settings}}
    elif file == "mlc-chat-config.json":
        model = config | {"context_window_size": config["max_position_embeddings"]}
        written = {file: {"model_type": config["model_type"], "quantization": settings, "model_config": model}}
    for name, content in written.items():
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setattr(inspection.hub, "download_files", lambda reference, files: tmp_path)
    result = runner.invoke(cli, ["inspect", "hf:org/tiny"])
    if says is None:
        assert result.exit_code == 0 and "mlc hf:org/tiny" in result.output, result.output
    else:
        assert (result.exit_code, result.output.count("\n")) == (2, 1), result.output
        assert result.output.startswith("Error: hf:org/tiny: ") and says in result.output


@pytest.mark.parametrize(("name", "stack"), [("qwen3_moe", "experts"), ("deepseek_v2", "heads of latent attention")])
def test_stacks_whose_inputs_are_sorted_are_refused_by_name(
    name: str, stack: str, runner: CliRunner, tmp_path: Path
) -> None:
    """Both commands say it, and that rounding helps."""
    write_quantized(name, "gptq sorted", tmp_path / "source")
    (tmp_path / "out").mkdir()
    compiling = ["compile", str(tmp_path / "source"), "-o", str(tmp_path / "out" / "x.radixlm")]
    for command in (["inspect", str(tmp_path / "source")], compiling):
        result = runner.invoke(cli, command)
        assert result.exit_code == 2
        assert f"is of {stack}, and its inputs are sorted (act-order)" in result.stderr
    assert not list((tmp_path / "out").iterdir())
    assert runner.invoke(cli, ["inspect", str(tmp_path / "source"), "--quantize", "q8"]).exit_code == 0


def test_windows_and_experts_are_told(runner: CliRunner, tmp_path: Path) -> None:
    from radixlm.cli.tables import layer_rows
    from radixlm.compile.families.settings import Settings
    from radixlm.runtime.artifact.model_config import Experts, LayerConfig

    values = {**FAMILIES["qwen3"].config, "rope_parameters": None}
    c = Settings("x", "huggingface", "qwen3", "Qwen3ForCausalLM", values)
    experts = Experts(num_experts=8, num_active=2, intermediate_size=32)
    model = c.model(
        lambda _, i: LayerConfig(mixer=c.attention(window=32 if i else None), ffn=experts if i else c.dense())
    )
    rows = dict(layer_rows(model))
    others = c.num_layers - 1
    assert rows["windows"] == f"{others} layers see 32 tokens"
    assert rows["experts"] == f"2 of 8 per token, in {others} layers"


def test_verify_is_of_artifacts(runner: CliRunner, tiny_source: Path) -> None:
    result = runner.invoke(cli, ["inspect", str(tiny_source), "--verify"])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
