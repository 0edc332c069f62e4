"""What a request enters is counted, and docs/architecture.md tells its stops in their order."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from radixlm.runtime import Engine

from bench.trace import ROOT, Trace, ask, lines_of, served

STOP = re.compile(r"^.{22}(\S+\.py) (\w+) ", re.MULTILINE)


@pytest.fixture(scope="module")
def trace(tiny_artifact: Path) -> Iterator[Trace]:
    """Of a chat."""
    trace = Trace()
    threading.setprofile(trace)
    try:
        with Engine(tiny_artifact, kv_cache_bytes=1 << 22, num_threads=1) as engine, served(engine) as port:
            files = trace.of(lambda: ask(port, max_tokens=2))
    finally:
        threading.setprofile(None)
    assert all(lines_of(path) and calls > 0 for path, calls in files.items())
    yield trace


def test_the_stops_of_a_chat_are_those_of_the_page(trace: Trace) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = text.partition("## The way of a request")[2].split("```")[1]
    called = [(file, name.rpartition(".")[2]) for file, name in trace.calls]
    firsts = []
    for module, function in STOP.findall(block):
        found = [place for place, (file, name) in enumerate(called) if file.endswith(f"/{module}") and name == function]
        assert found, f"a chat never calls {function} of {module}"
        firsts.append(found[0])
    assert len(firsts) == len(block.strip().splitlines()) and firsts == sorted(firsts)


def test_what_serves_no_chat_is_not_entered(trace: Trace) -> None:
    others = [f"{ROOT}/runtime/{folder}/" for folder in ("extras", "server/anthropic", "store")]
    assert not [file for file, _ in trace.calls if file.startswith(tuple(others))]
