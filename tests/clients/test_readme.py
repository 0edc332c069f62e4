"""What README shows of OpenAI's client runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..serve_process import ServeProcess
from .conftest import KEY

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_readmes_client_gets_an_answer(server: ServeProcess, capsys: pytest.CaptureFixture[str]) -> None:
    [shown] = re.findall(
        r"^```python\n(from openai.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    shown = shown.replace("http://localhost:8000", server.url).replace("any, where the server has none", KEY)
    exec(shown, {})
    *text, num_cached = capsys.readouterr().out.split()
    assert text and int(num_cached) >= 0  # how many words, only the model knows: it is sampled
