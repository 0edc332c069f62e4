"""What servers of both dialects stream becomes times, ids and texts, by one client."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.peers.client import CompletionsClient, LlamaCppClient, TextClient
from bench.peers.contestants import RadixLM
from bench.peers.other_engines import LlamaCpp
from bench.peers.scenarios import SCENARIOS, Scenario
from bench.processes import MemoryOfTree, core_taken
from bench.prompts import Prompts
from bench.served import Event
from bench.worker import ROOT

LLAMA_SERVER = ROOT / ".cache" / "llama.cpp" / "llama-server"
VOCABULARY = 300
SHORT = [scenario for scenario in SCENARIOS if scenario.name in ("decode", "streams_8")]


@pytest.fixture(scope="module")
def radixlm(tiny_artifact: Path) -> Iterator[RadixLM]:
    contestant = RadixLM(tiny_artifact)
    yield contestant
    contestant.close()


def test_every_token_has_the_time_of_its_event() -> None:
    events = [
        Event(1.0, {"choices": [{"text": "a", "token_ids": [5]}]}),
        Event(2.0, {"choices": [{"text": "bc", "token_ids": [6, 7]}]}),
        Event(3.0, {"choices": [{"text": "", "finish_reason": "length"}]}),
        Event(4.0, {"choices": []}),
    ]
    reply = CompletionsClient(0).reply(0.5, events)
    assert (reply.times, reply.token_ids, reply.text, reply.to_first_s) == ([1.0, 2.0, 2.0], [5, 6, 7], "abc", 0.5)


@pytest.mark.parametrize("counts", [True, False])
def test_a_token_without_an_event_counts_with_the_next(counts: bool) -> None:
    """llama.cpp says how many there are with every event, ik_llama.cpp with the last."""
    events = [
        Event(1.0, {"content": "a", "stop": False, "tokens": [5], **({"tokens_predicted": 1} if counts else {})}),
        Event(3.0, {"content": "é", "stop": False, "tokens": [7], **({"tokens_predicted": 3} if counts else {})}),
        Event(3.5, {"content": "", "stop": True, "tokens_predicted": 3}),
    ]
    reply = LlamaCppClient(0).reply(0.0, events)
    assert reply.times == ([1.0, 3.0, 3.0] if counts else [1.0, 3.0, 3.5])
    assert reply.text == "aé"


@pytest.mark.parametrize("scenario", SHORT, ids=lambda scenario: scenario.name)
def test_radixlm_is_measured_over_http(radixlm: RadixLM, scenario: Scenario) -> None:
    found = radixlm.measure(scenario, Prompts(0, VOCABULARY))
    assert scenario.name in found and min(found.values()) > 0


def test_a_request_that_is_refused_is_an_error(radixlm: RadixLM) -> None:
    client = radixlm._start_client(radixlm.commands(SCENARIOS[0])[0])
    with pytest.raises(RuntimeError, match="answered 400"):
        client.ask_all([[5, 6, 7], [VOCABULARY * 1000]], 8)


def test_llama_cpp_is_measured_by_the_same_calls(smollm2_gguf: Path) -> None:
    if not LLAMA_SERVER.is_file():
        pytest.skip("llama.cpp is built by `make bench-peers`")
    peer = LlamaCpp("llama.cpp", (str(LLAMA_SERVER),), smollm2_gguf, 2)
    try:
        found = peer.measure(SHORT[0], Prompts(0))
        assert found["decode"] > 0
    finally:
        peer.close()


def test_memory_is_that_of_all_below_a_process() -> None:
    hold = "import sys; held = bytearray(64 << 20); print(1, flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.read(1) == b"1"
        with MemoryOfTree(process.pid) as memory:
            while not memory.peak_bytes:
                pass
        assert 64 << 20 < memory.peak_bytes < 128 << 20
        process.communicate(b"")


def test_a_prompt_of_words_has_as_many_tokens_as_ids() -> None:
    """dasLLAMA takes no ids, and tells how many tokens there were when all have come."""
    client = TextClient(0, [" one", " two", " three"])
    assert client.body([0, 5, 4], 2)["prompt"] == " one three two"
    usage = {"prompt_tokens": 3, "completion_tokens": 3}
    events = [
        Event(1.0, {"choices": [{"text": "a"}]}),
        Event(2.0, {"choices": [{"text": "é"}]}),
        Event(2.5, {"choices": [{"text": "", "finish_reason": "length"}]}),
        Event(2.6, {"choices": [], "usage": usage}),
    ]
    reply = client.reply(0.0, events)
    assert (reply.times, reply.num_prompt_tokens) == ([1.0, 2.0, 2.5], 3)


def test_a_core_is_taken_while_a_block_runs() -> None:
    children = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children")
    before = set(children.read_text().split())
    with core_taken():
        [pid] = set(children.read_text().split()) - before
        deadline = time.monotonic() + 60
        while len(os.sched_getaffinity(int(pid))) != 1:
            assert time.monotonic() < deadline, "it may run on all processors"
            time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()
