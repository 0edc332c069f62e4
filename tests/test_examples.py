"""Every example runs as its docstring says, on the real default model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# A line of each example's output that only a working engine prints.
EXPECTED = {
    "generate.py": "Paris",
    "stream.py": "cancelled after",
    "chat_cache.py": "prompt tokens came from the cache",
    "fifty_threads.py": "50 threads",
}


def run(name: str, *arguments: str | Path) -> str:
    command = [sys.executable, EXAMPLES / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_runs(name: str, smollm2_artifact: Path) -> None:
    assert EXPECTED[name] in run(name, smollm2_artifact)


def test_the_compile_example_writes_an_artifact(smollm2_gguf: Path, tmp_path: Path) -> None:
    output = run("compile.py", smollm2_gguf, tmp_path / "small.radixlm")
    assert "publish" in output
    assert (tmp_path / "small.radixlm" / "manifest.json").is_file()


def test_the_chat_finds_more_in_the_cache_with_each_turn(smollm2_artifact: Path) -> None:
    lines = [line for line in run("chat_cache.py", smollm2_artifact).splitlines() if "from the cache" in line]
    counts = [int(line.split()[0]) for line in lines]
    assert counts == sorted(set(counts))
    assert len(counts) == 3


def test_every_example_is_run_by_a_test() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*EXPECTED, "compile.py"}
