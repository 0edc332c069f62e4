"""A wheel that was installed into a clean environment does what README says, with neither a C compiler nor a linker."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, Clean, Install, completion, uv

README = (ROOT / "README.md").read_text(encoding="utf-8")
# What `make test-wheel` gives each command of README in place of its model, and what it takes besides.
LEFT_OUT = {"serve", "agent", "run"}  # they run until they are stopped, or ask the hub; `serve` has tests of its own
EXIT_CODES = {"replay-kv": 2, "replay": 2}  # an empty log is none, nor are requests a recording
PLACES = {"model.gguf": "tiny", "smollm2": "tiny", "smollm2.radixlm": "tiny.radixlm"}


def commands() -> list[list[str]]:
    """README's first block of commands, as words."""
    block = next(each for each in re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S) if "radixlm compile" in each)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    return [line for line in lines if line[1] not in LEFT_OUT]


def test_it_compiles_and_serves_without_gcc(install: Install, python: str, tiny_source: Path, tmp_path: Path) -> None:
    clean = install(python, ["radixlm"])
    assert shutil.which("cc", path=clean.environment["PATH"]) is None
    artifact = tmp_path / "tiny.radixlm"
    clean.run("radixlm", "compile", tiny_source, "-o", artifact)
    assert "all files match" in clean.run("radixlm", "inspect", artifact, "--verify").stdout
    said = clean.run("radixlm", "generate", artifact, "The capital", "--max-tokens", "8", "--temperature", "0").stdout
    with clean.serving(artifact) as url:
        assert completion(url, "The capital") == said.removesuffix("\n")


def test_a_model_is_served_in_one_line(install: Install, tiny_source: Path) -> None:
    with install(sys.executable, ["radixlm"]).serving(tiny_source) as url:
        assert completion(url, "The capital")


@pytest.fixture(scope="module")
def readme_folder(tiny_source: Path, tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where README's commands run, one after another, with a tiny model in place of SmolLM2."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(tiny_source, folder / "tiny")
    shutil.copytree(tiny_artifact, folder / "tiny.radixlm")
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "No"},
    ]
    (folder / "talk.json").write_text(json.dumps(talk), encoding="utf-8")
    (folder / "bodies.jsonl").write_text(json.dumps({"messages": talk[:1]}) + "\n", encoding="utf-8")
    (folder / "kv.jsonl").write_text("", encoding="utf-8")
    return folder


@pytest.mark.parametrize("words", commands(), ids=lambda words: words[1])
def test_a_command_of_the_readme_runs(install: Install, readme_folder: Path, words: list[str]) -> None:
    if words[1] == "compile":  # to a place of its own, and no context that the tiny model has not
        words = [word for word in words if word not in ("--context-length", "4096")]
        words[words.index("-o") + 1] = f"{len(words)}.radixlm"
    arguments = [PLACES.get(word, word) for word in words[1:]]
    done = install(sys.executable, ["radixlm"]).run("radixlm", *arguments, ok=False, input="Hi\n", cwd=readme_folder)
    assert done.returncode == EXIT_CODES.get(words[1], 0), done.stdout + done.stderr


def test_uvx_runs_the_command(built: Path) -> None:
    said = uv("tool", "run", "--isolated", "--find-links", built, "radixlm", "--version")
    assert re.fullmatch(r"radixlm, version \d+\.\d+\.\d+", said)


def test_the_alias_has_the_downloader_that_it_needs(install: Install) -> None:
    """An environment of uv has no pip of its own, and `radixlm compile smollm2` downloads with it."""
    assert "pip" in install(sys.executable, ["radixlm"]).run("python", "-m", "pip", "--version").stdout


def test_removing_the_compiler_leaves_what_serves(built: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    clean = Clean(tmp_path / "venv")
    install = ("pip", "install", "--python", clean.path, "--find-links", built)
    uv("venv", "--python", sys.executable, clean.path)
    uv(*install, "radixlm")
    uv("pip", "uninstall", "--python", clean.path, "radixlm", "apache-tvm", "gguf", "ml-dtypes", "safetensors")
    uv(*install, "--reinstall-package", "radixlm-serve", "radixlm-serve")  # the command was removed with radixlm
    clean.run("radixlm", "generate", tiny_artifact, "The capital", "--max-tokens", "4")
