"""radixlm-serve: artifacts are served without the compiler, in an environment of less than 120 MB."""

from __future__ import annotations

import json
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from .conftest import ROOT, Clean, Install, completion

MAX_BYTES = 120_000_000  # of all files but bytecode, which Python writes as it runs
MAX_LOCKED_BYTES = 100_000_000
LOCK = ROOT / "requirements-serve.lock"


@pytest.fixture(scope="module")
def serve_only(install: Install) -> Clean:
    return install(sys.executable, ["radixlm-serve"])


@pytest.fixture(scope="module")
def locked(install: Install) -> Clean:
    """With what requirements-serve.lock pins, and no more."""
    return install(sys.executable, ["--no-deps", "radixlm-serve", "-r", LOCK])


def num_bytes(clean: Clean) -> int:
    """Of all that is installed, without bytecode."""
    files = (path for path in clean.packages.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return sum(path.stat().st_size for path in files)


def test_it_serves_an_artifact(install: Install, python: str, tiny_artifact: Path) -> None:
    with install(python, ["radixlm-serve"]).serving(tiny_artifact) as url:
        said = completion(url, "The capital")
    options = ("--max-tokens", "8", "--temperature", "0")
    full = install(sys.executable, ["radixlm"]).run("radixlm", "generate", tiny_artifact, "The capital", *options)
    assert said == full.stdout.removesuffix("\n")


def test_nothing_of_the_compiler_is_there_and_it_is_small(serve_only: Clean) -> None:
    names = {found.metadata["Name"] for found in distributions(path=[str(serve_only.packages)])}
    assert names & {"apache-tvm", "gguf", "ml_dtypes", "safetensors", "radixlm"} == set()
    assert num_bytes(serve_only) < MAX_BYTES


def test_the_lock_is_all_that_serving_loads(locked: Clean, tiny_artifact: Path) -> None:
    with locked.serving(tiny_artifact) as url:
        assert completion(url, "The capital")
    assert num_bytes(locked) < MAX_LOCKED_BYTES


COMMANDS = (["serve"], ["chat"], ["generate", "Hi"], ["compile", "-o", "x.radixlm"], ["inspect"])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_file_is_refused_in_one_line(serve_only: Clean, tiny_source: Path, command: list[str]) -> None:
    done = serve_only.run("radixlm", command[0], tiny_source, *command[1:], ok=False)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and "is not installed; run: pip install radixlm" in line and done.stdout == ""


def test_a_json_log_says_it_too(serve_only: Clean, tiny_source: Path) -> None:
    done = serve_only.run("radixlm", "serve", tiny_source, "--log-format", "json", ok=False)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and "run: pip install radixlm" in json.loads(line)["message"]
