"""A GGUF file of a model that compiles, through the real commands: inspected, continued and served; whole and cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from ..goldens import tiny_gguf
from ..goldens.families import FAMILIES
from ..serve_process import ServeProcess
from ..split_gguf import split_in
from ..stand_in_hub import StandInHub
from .forked_command import run_forked

COMMAND = [sys.executable, "-c", "from radixlm.cli.main import main; main()"]
MATRICES = ("attn_q.", "attn_k.", "attn_v.", "attn_output.", "ffn_gate.", "ffn_up.", "ffn_down.")
LESS_MEMORY = ("--kv-cache-gb", "0.1")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Qwen3, as llama.cpp's converter and quantizer write it."""
    return tiny_gguf.write(FAMILIES["qwen3"], tmp_path / "qwen3.gguf", dict.fromkeys(MATRICES, Type.Q8_0))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where artifacts go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "radixlm" / "artifacts"


def test_a_model_of_the_hub_is_pulled_used_offline_and_removed(
    file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes in parts. What was downloaded is compiled again after the artifact was removed."""
    hub = StandInHub(tmp_path / "hub")
    hub.folder.mkdir(parents=True)
    for part in split_in(file, hub.folder, 8):
        part.rename(part.with_name(part.name.replace("tiny-", "tiny-Q8_0-")))
    model, arguments = "hf:org/tiny:Q8_0", ("the rain", "--max-tokens", "4", "--temperature", "0", *LESS_MEMORY)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with hub.running():
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        pulled = run("pull", model)
    assert pulled.returncode == 0, pulled.stderr
    [artifact] = cache.iterdir()
    assert pulled.stdout == f"{artifact}\n" and artifact.name.startswith("tiny-Q8_0-")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    first = run("generate", model, *arguments)
    assert (first.returncode, first.stderr) == (0, "")
    rows = json.loads(run("list", "--json").stdout)
    assert {(row["kind"], row["name"]) for row in rows} == {
        ("compiled", artifact.name.removesuffix(".radixlm")),
        ("download", "hf:org/tiny"),
    }
    assert run("rm", model).returncode == 0
    assert list(cache.iterdir()) == []
    again = run("generate", model, *arguments)
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert again.stderr.startswith(f"compiling {model}, once")


def test_a_gguf_file_is_inspected_continued_and_served(file: Path, cache: Path, tmp_path: Path) -> None:
    """Generating compiles it, serving finds it compiled, and both say the same."""
    told = run("inspect", file)
    assert told.returncode == 0, told.stderr
    rows = dict(line.split("  ", 1) for line in told.stdout.splitlines())
    assert (rows["source"].strip(), rows["family"].strip()) == (f"gguf {file}", "Qwen3")
    assert rows["can be compiled"].strip() == "yes" and not cache.exists()

    prompt = "the rain in the"
    generated = run("generate", file, prompt, "--max-tokens", "8", "--temperature", "0", *LESS_MEMORY)
    assert generated.returncode == 0, generated.stderr
    assert generated.stderr.startswith(f"compiling {file}, once")
    [artifact] = cache.iterdir()
    assert artifact.name.startswith("qwen3-")

    serving = [*COMMAND, "serve", str(file), "--port", "0", *LESS_MEMORY]
    with ServeProcess(command=serving, log=tmp_path / "log") as server:
        assert "compiling" not in server.log
        asked = {"model": "qwen3", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        served = server.json("/v1/completions", asked)["choices"][0]["text"]
    assert generated.stdout == f"{served}\n" and served


@pytest.mark.parametrize("keep", [0.02, 0.3, 0.999])
def test_a_cut_gguf_file_of_a_supported_model_is_one_line(keep: float, file: Path, cache: Path) -> None:
    os.truncate(file, int(file.stat().st_size * keep))
    for command in (("inspect", file), ("generate", file, "x"), ("serve", file, "--port", "0")):
        done = run_forked([*map(str, command)], timeout_s=300)
        assert done.returncode == 2
        assert "fetch it again" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
        assert done.stderr.count("fetch it again") == 1
    assert not cache.exists() or not list(cache.iterdir())


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300)
