"""A recorded session is the same each time, grows as a conversation does, and survives what happens to its server."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.agents.clients import REMINDER
from bench.agents.coding_session import NUM_REPLY_TOKENS, WAYS, Answer, before_of, check_prompts, middle, play_session
from bench.agents.servers import AgentsServer, servers_of
from bench.agents.session import NUM_SUBAGENT_TURNS, SHAPE, session
from bench.peers.other_engines import PLACES
from bench.report.session import picture
from bench.report.session import session as section

STANDS_IN = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200); self.end_headers()
        chunks = [{"choices": [{"delta": {"role": "assistant"}}]}]
        chunks += [{"choices": [{"delta": {"content": "a"}}]}] * body["max_tokens"]
        usage = {"completion_tokens": body["max_tokens"], "prompt_tokens": os.getpid(), "prompt_tokens_details": None}
        for chunk in [*chunks, {"choices": [], "usage": usage}]:
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\\n\\n")

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
"""Tells its process's id for the length of prompts."""


def prompt(body: dict[str, Any]) -> str:
    return "".join(str(message) for message in body["messages"])


def test_a_conversation_is_sent_again_with_what_was_new_and_a_reminder_that_moves() -> None:
    requests = session(9, 4000)
    assert requests == session(9, 4000)
    for agent, num_turns in ((0, 9), (1, NUM_SUBAGENT_TURNS), (2, NUM_SUBAGENT_TURNS)):
        bodies = [request.body for request in requests if request.agent == agent]
        assert len(bodies) == num_turns
        for before, after in pairwise(bodies):
            assert before["messages"][-1]["content"] == REMINDER
            kept = before["messages"][:-1]
            assert after["messages"][: len(kept)] == kept and len(after["messages"]) > len(before["messages"])
            assert before["tools"] == after["tools"]


def test_calls_are_answered_by_their_names() -> None:
    messages = session(9, 4000)[-1].body["messages"]
    called = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    answered = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert called == answered and len(set(called)) == len(called)


def test_subagents_take_turns_while_the_main_conversation_waits() -> None:
    agents = [request.agent for request in session(9, 4000)]
    assert agents == [0] * 3 + [1, 2] * NUM_SUBAGENT_TURNS + [0] * 6
    assert SHAPE.num_subagents == 2


def test_a_longer_session_has_longer_prompts() -> None:
    short, long = (len(prompt(session(9, num_tokens)[-1].body)) for num_tokens in (20_000, 60_000))
    assert 2.5 < long / short < 4


@pytest.mark.parametrize("way", WAYS)
def test_a_server_is_another_process_from_the_middle_on_where_it_restarts(way: str, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(STANDS_IN)
    done: list[str] = []

    def noted(name: str) -> Callable[[int], None]:
        return lambda port: done.append(name)

    command = (sys.executable, str(tmp_path / "server.py"))
    server = AgentsServer("it", command, before_end=noted("saved"), after_start=noted("restored"))
    requests = session(5, 4000)
    answers = play_session(server, requests, way)
    processes = [answer.num_prompt for answer in answers]
    place = middle(requests)
    assert requests[place].agent == 0 and [request.agent for request in requests[:place]].count(0) == 2
    assert len(set(processes[:place])) == len(set(processes[place:])) == 1
    assert (processes[0] == processes[-1]) == (way == "whole")
    assert done == (["saved", "restored"] if way == "unloaded" else [])
    waited = answers[place].to_first_s
    assert way == "whole" or waited > 2 * max(answer.to_first_s for answer in answers[place + 1 :])
    assert all(0 < answer.to_first_s <= answer.seconds for answer in answers)


def test_a_reply_that_ends_early_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(
        STANDS_IN.replace('"completion_tokens": body["max_tokens"]', '"completion_tokens": 1')
    )
    with pytest.raises(ValueError, match=f"{NUM_REPLY_TOKENS} were asked for"):
        play_session(AgentsServer("it", (sys.executable, str(tmp_path / "server.py"))), session(2, 4000), "whole")


def test_a_server_that_cuts_prompts_is_not_compared() -> None:
    """ik_llama.cpp, with too small a context, was as fast as half of the prompt."""
    whole, same, cut = (Answer(0, 1.0, 2.0, num_prompt, 0) for num_prompt in (4140, 4138, 2092))
    check_prompts([whole, same], [same, whole])
    with pytest.raises(ValueError, match="prompt 1 has 2092 tokens, and 4140"):
        check_prompts([whole, cut], [whole, whole])


def test_servers_keep_what_they_can(tmp_path: Path) -> None:
    servers = {each.name: each for each in servers_of(tmp_path, tmp_path, PLACES, 8000, 32, tmp_path)}
    assert "--store" in servers["radixlm"].command and servers["radixlm"].fields == {"min_tokens": 32}
    for flag in ("--cache-reuse", "--slot-save-path", "--kv-unified"):
        assert flag in servers["llama.cpp"].command
    assert {name for name, each in servers.items() if each.fields.get("ignore_eos")} == {"llama.cpp", "ik_llama.cpp"}


def test_pieces_of_one_session_add_up_and_those_of_another_are_refused() -> None:
    session_of = {"shape": "qwen3-4b", "layers": [2, 36], "decode_scale": 4.96551}
    before = {**session_of, "decode_scale": 4.966, "ways": {"whole": {}}}  # as results are rounded
    assert before_of(session_of, before) == before and before_of(session_of, None) == {}
    with pytest.raises(ValueError, match=r"layers is \[3, 36\], and \[2, 36\] in the results"):
        before_of({**session_of, "layers": [3, 36]}, before)


def results(layers: list[int]) -> dict[str, Any]:
    requests = session(4, 4000)

    def answers(seconds: float, waits: float) -> list[dict[str, Any]]:
        each = [Answer(request.agent, seconds, seconds + 1.0, 100, 60) for request in requests]
        each[middle(requests)] = Answer(0, waits, waits + 1.0, 100, 0)
        return list(map(dataclasses.asdict, each))

    return {
        "shape": "qwen3-4b",
        "layers": layers,
        "decode_scale": 2.0,
        "num_reply_tokens": 32,
        "missing": {"dasLLAMA": "there is none"},
        "taken_by_others": {"killed": {"radixlm": 0.014, "llama.cpp": 0.12}},
        "ways": {"killed": {"radixlm": answers(0.5, 2.0), "llama.cpp": answers(2.0, 90.0)}},
    }


def test_the_whole_models_seconds_are_scaled_by_layers_and_bytes() -> None:
    text = "".join(section(results([9, 36])))
    total, firsts = 12 * 1.5 + 1.5, 12 * 0.5 + 1.5
    seconds = f"{total:.1f} | 0.50 | 0.50 | 2.00 | 55% | 1% | {firsts * 4 + 12 * 2:.1f}"
    assert f"| server killed in the middle: radixlm | {seconds} |" in text
    assert "Not measured: dasLLAMA (there is none)." in text
    assert "scaled" not in "".join(section(results([36, 36])))


def test_the_picture_has_a_line_for_each_server() -> None:
    root = ElementTree.fromstring(picture(results([2, 36])))
    lines = {line.get("stroke"): line.get("points", "").split() for line in root.findall("{*}polyline")}
    names = {text.get("fill"): text.text for text in root.findall("{*}text") if text.get("fill")}
    assert set(names.values()) == {"radixlm", "llama.cpp"} and set(lines) == set(names)
    heights = {names[color]: [float(point.split(",")[1]) for point in points] for color, points in lines.items()}
    assert all(len(points) == 4 for points in heights.values())
    for ours, theirs in zip(heights["radixlm"], heights["llama.cpp"], strict=True):
        assert ours > theirs  # SVG counts from the top: theirs took longer
    assert heights["llama.cpp"].index(min(heights["llama.cpp"])) == 2  # where the server was killed
