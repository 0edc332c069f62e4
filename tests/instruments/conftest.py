"""One server for all instruments, a tokenizer for those that want one on disk, and what became of their requests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ..serve_process import ServeProcess

MODEL = "smollm2"
TIMEOUT_S = 300.0


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    options = ("--model-id", MODEL, "--kv-cache-gb", "0.5")
    with ServeProcess(*options, log=tmp_path_factory.mktemp("server") / "log") as server:
        yield server


@pytest.fixture(autouse=True)
def no_request_fails(server: ServeProcess) -> Iterator[None]:
    """Each request of a test is answered with 200."""
    before = responses(server)
    yield
    server.wait_until_idle()
    now = responses(server)
    found = {key: count - before.get(key, 0) for key, count in now.items() if count > before.get(key, 0)}
    failed = {key: count for key, count in found.items() if key[1] != "200" and key[0].startswith("/v1/")}
    assert not failed, server.log[-5000:]
    assert any(path.startswith("/v1/") for path, _ in found), "nothing was asked"
    assert "Traceback" not in server.log


def responses(server: ServeProcess) -> dict[tuple[str, str], float]:
    """How many requests were answered so far, by path and status."""
    pattern = r"^radixlm_http_responses_total\{(.*)\} (\S+)$"
    found: dict[tuple[str, str], float] = {}
    for labels, count in re.findall(pattern, server.bytes("/metrics").decode(), flags=re.MULTILINE):
        by_name = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found[by_name["path"], by_name["status"]] = float(count)
    return found


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's tokenizer as transformers reads it, offline."""
    folder = tmp_path_factory.mktemp("tokenizer")
    text = (Path(os.environ["RADIXLM_ARTIFACT"]) / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    config = '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}'
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")
    return folder


def run(
    folder: Path,
    name: str,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    home: Path | None = None,
) -> str:
    """What a command of the suite's environment prints, run in a folder, without the network; it must succeed.

    Args:
        home: a folder for what it keeps; the folder itself where none is given.
    """
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    offline |= {"NO_PROXY": "127.0.0.1", "HOME": str(home or folder), "PYTHONUNBUFFERED": "1"}
    command = [Path(sys.executable).parent / name, *map(str, arguments)]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **offline, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-10_000:]
    return done.stdout
