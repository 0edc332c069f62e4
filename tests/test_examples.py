"""Every example runs as its docstring says, on the real default model."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# A line of each example's output that only a working engine prints.
EXPECTED = {
    "generate.py": "Paris",
    "stream.py": "cancelled after",
    "chat_cache.py": "prompt tokens came from the cache",
    "fifty_threads.py": "50 threads",
    "structured_output.py": "The mood is ",
    "tools.py": "It rains in ",
    "asynchronous.py": "given up after half a second",
    "batch.py": "2: the prompt is empty",
}
OTHERS = {"compile.py", "fastapi_app.py"}  # have a test of their own


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


def test_the_service_answers_streams_and_refuses(smollm2_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from starlette.testclient import TestClient

    monkeypatch.setenv("RADIXLM_ARTIFACT", str(smollm2_artifact))
    spec = spec_from_file_location("fastapi_app", EXAMPLES / "fastapi_app.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fastapi_app", module)  # pydantic looks up its types there
    spec.loader.exec_module(module)
    with TestClient(module.app) as client:
        assert client.post("/ask", json={"text": "Name a tree.", "max_tokens": 8}).json()["text"]
        assert client.post("/stream", json={"text": "Name a tree.", "max_tokens": 8}).text
        assert set(client.get("/person").json()) == {"name", "age"}
        too_long = client.post("/ask", json={"text": "tree " * 20_000})
        assert too_long.status_code == 400 and "maximum context length" in too_long.json()["detail"]


def test_the_notebook_s_cells_run_one_after_another(
    smollm2_artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RADIXLM_ARTIFACT", str(smollm2_artifact))
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in notebook["cells"])

    async def run_cells() -> None:
        names: dict[str, Any] = {}
        for cell in cells:
            code = compile(cell, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, names)
            if inspect.isawaitable(result):
                await result
        assert "closed" in repr(names["engine"])

    asyncio.run(run_cells())
    assert "Paris" in capsys.readouterr().out


def test_every_example_is_run_by_a_test() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*EXPECTED, *OTHERS}
    assert {path.name for path in EXAMPLES.glob("*.ipynb")} == {"notebook.ipynb"}
