"""compile, inspect, generate and serve on the real default model."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from radixlm.cli.inspect import appended_suffix
from radixlm.cli.main import cli
from radixlm.runtime.artifact import Artifact

RADIXLM = [sys.executable, "-c", "from radixlm.cli.main import main; main()"]


def test_inspect_shows_dimensions_weights_and_files(runner: CliRunner, smollm2_artifact: Path) -> None:
    result = runner.invoke(cli, ["inspect", str(smollm2_artifact), "--verify"])
    assert result.exit_code == 0, result.output
    rows = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in result.output.splitlines())
    assert rows["architecture"] == "llama"
    assert rows["vocabulary"] == "49,152"
    assert rows["quantization"] == "keep"
    assert rows["appended suffix"].startswith("token 216, a space at the end of a prompt: stripped")
    assert rows["digests"] == "all files match the manifest"
    assert {"model.so", "weights.safetensors", "tokenizer.json"} <= set(rows)


def test_inspect_says_that_opening_an_artifact_runs_its_code(runner: CliRunner, smollm2_artifact: Path) -> None:
    result = runner.invoke(cli, ["inspect", str(smollm2_artifact)])
    [row] = [line for line in result.output.splitlines() if line.startswith("code ")]
    assert "opening the artifact runs model.so" in row and "trust" in row


def test_serve_help_says_that_opening_an_artifact_runs_its_code(runner: CliRunner) -> None:
    told = " ".join(runner.invoke(cli, ["serve", "--help"]).output.split())
    assert "Opening an artifact runs its model.so" in told and "trust" in told


def test_every_suffix_is_named_and_none_is_said_to_be_none(smollm2_artifact: Path) -> None:
    manifest = Artifact.open(smollm2_artifact).manifest
    assert appended_suffix(manifest).startswith("token 216, ")
    for suffix_ids, says in (([], "none: "), ([29871, 259], "token 29871 or 259, ")):
        tokenizer = replace(manifest.tokenizer, profile={**manifest.tokenizer.profile, "suffix_ids": suffix_ids})
        assert appended_suffix(replace(manifest, tokenizer=tokenizer)).startswith(says)


def test_inspect_prints_the_manifest_as_json(runner: CliRunner, smollm2_artifact: Path) -> None:
    result = runner.invoke(cli, ["inspect", str(smollm2_artifact), "--json"])
    assert json.loads(result.output) == json.loads((smollm2_artifact / "manifest.json").read_text())


def test_inspect_says_whether_a_draft_has_the_same_tokens(
    runner: CliRunner, smollm2_artifact: Path, smollm2_f16_artifact: Path, tiny_artifact: Path
) -> None:
    result = runner.invoke(cli, ["inspect", str(smollm2_artifact), "--draft", str(smollm2_f16_artifact)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].endswith("has the same 49,152 tokens, and can draft")
    result = runner.invoke(cli, ["inspect", str(smollm2_artifact), "--draft", str(tiny_artifact)])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "has other tokens" in result.output and "choose a draft" in result.output


def test_inspect_verify_finds_a_changed_byte(runner: CliRunner, smollm2_artifact: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "changed.radixlm"
    shutil.copytree(smollm2_artifact, artifact)
    with (artifact / "weights.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    result = runner.invoke(cli, ["inspect", str(artifact), "--verify"])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "weights.safetensors" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no-such.gguf"], "no-such.gguf"),
        (["{empty}"], "no model"),
        (["{text}"], "{text}"),
        (["{text}", "--target", "mips"], "unknown target"),
    ],
)
def test_compile_refuses_bad_input_with_one_line_and_leaves_nothing(
    runner: CliRunner, tmp_path: Path, arguments: list[str], says: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.gguf").write_text("not a model")
    names = {"empty": str(tmp_path / "empty"), "text": str(tmp_path / "text.gguf")}
    output = tmp_path / "out" / "x.radixlm"
    output.parent.mkdir()
    result = runner.invoke(cli, ["compile", *(a.format(**names) for a in arguments), "-o", str(output), "--json"])
    assert (result.exit_code, result.output.count("\n")) == (2, 1), result.output
    assert result.output.startswith("Error: ")
    assert says.format(**names) in result.output
    assert list(output.parent.iterdir()) == []


def test_compile_says_that_a_chat_template_cannot_be_used(runner: CliRunner, tiny_source: Path, tmp_path: Path) -> None:
    source, output = shutil.copytree(tiny_source, tmp_path / "source"), tmp_path / "x.radixlm"
    (source / "chat_template.jinja").write_text("{% for %}")
    result = runner.invoke(cli, ["compile", str(source), "-o", str(output)])
    assert result.exit_code == 0, result.output
    assert "but not chats: the model's chat template is not valid Jinja" in result.stderr
    assert result.stdout == f"{output} is ready: radixlm serve {output}\n"


@pytest.mark.parametrize("prompt", ["", "word " * 10_000])
def test_generate_refuses_an_empty_and_an_endless_prompt(
    runner: CliRunner, smollm2_artifact: Path, prompt: str
) -> None:
    result = runner.invoke(cli, ["generate", str(smollm2_artifact), prompt])
    assert (result.exit_code, result.output.count("\n")) == (2, 1), result.output


def test_serve_answers_and_finds_the_second_prompt_in_the_cache(smollm2_artifact: Path) -> None:
    command = [*RADIXLM, "serve", smollm2_artifact, "--port", "0", "--model-id", "small"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        said = next(line for line in server.stderr if line.startswith("serving "))
        address = re.search(r"http://\S+", said)
        assert address is not None
        body = {"model": "small", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        first, second = (httpx.post(f"{address[0]}/completions", json=body, timeout=60).json() for _ in "ab")
        assert first["choices"] == second["choices"]
        assert "Paris" in first["choices"][0]["text"]
        cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in (first, second)]
        assert cached == [0, first["usage"]["prompt_tokens"] - 1]
        server.send_signal(signal.SIGINT)
        assert server.wait(30) in (0, 130)
    finally:
        server.kill()
        server.wait()


def test_serve_says_when_its_port_is_taken(runner: CliRunner, smollm2_artifact: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = runner.invoke(cli, ["serve", str(smollm2_artifact), "--port", port])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert f"port {port} of 127.0.0.1 is in use" in result.output
