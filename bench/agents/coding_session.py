"""Measure a coding session as its user sees it: total time, time to first tokens, and the cost of a restart.

    python -m bench.agents.coding_session [--shape qwen3-4b] [--layers 1] [--turns 30] [--tokens 20000]
                                          [--ways whole killed unloaded] [--servers radixlm llama.cpp ...] [--add]

The session is that of `session.py`: one long conversation and two subagents, sent over chat completions one request
after the other, with the history as recorded. Replies have 16 tokens. `killed`: before the middle request of the
main conversation the server is killed with SIGKILL and restarted, which that request waits for. `unloaded`: the server
ends in an orderly way there, as after an idle hour, and starts when the request comes; llama.cpp may save its slots
before and restore them then. Weights are random (`bench/peers/shapes.py`). For a model with fewer layers, the seconds
of the whole one are scaled: prompts by layers, replies by bytes of weights. `--layers 36` is the whole Qwen3-4B.

The results have the share of CPU time that other processes took meanwhile: servers whose threads spin for
each other lose much more than that.

`--add` keeps earlier results of the same session: it can be measured in parts, a server and way at a time.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from radixlm.compile import compile_model

from ..machine import ROOT, CPUTime
from ..options import read_options
from ..peers.contestants import OURS
from ..peers.other_engines import PLACES
from ..peers.shapes import SHAPES
from ..peers.sizes import shape_file
from ..report.page import publish
from ..report.session import picture
from ..report.tables import origins_before
from ..results import read_results
from ..served import Client, Event, Json, ServedProcess
from .servers import AgentsServer, servers_of
from .session import Request, session

NUM_REPLY_TOKENS = 16
WAYS = ("whole", "killed", "unloaded")
SERVERS = (OURS, "llama.cpp", "ik_llama.cpp", "dasLLAMA")
PICTURE = ROOT / "docs" / "session.svg"
_ROOM = 4096  # tokens of context beyond the longest prompt, whose length is an estimate, and its reply
_SAME = 0.05  # by which share the templates of servers may make other tokens of a request
_STARTS_WITHIN_S = 400.0
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
_FIXED = {**_STREAMED, "temperature": 0, "max_tokens": NUM_REPLY_TOKENS}


@dataclass(frozen=True)
class Answer:
    """Seconds since an agent wanted to send a request, including a restart before it; tokens as the server reports."""

    agent: int
    to_first_s: float
    seconds: float
    num_prompt: int
    num_cached: int


def main() -> None:
    """Send a coding session to each server, print, and write `results/session.json` and the picture."""
    options = read_options(
        __doc__,
        shape="qwen3-4b",
        layers=1,
        turns=30,
        tokens=20_000,
        ways=WAYS,
        servers=SERVERS,
        add=False,
        cache=Path(".cache"),
    )
    whole = SHAPES[options.shape]
    shape = whole.with_layers(options.layers)
    cache = options.cache.resolve()
    gguf, artifact = shape_file(shape, cache), cache / "sizes" / f"{shape.name}-{shape.num_layers}l.radixlm"
    if not artifact.exists() or artifact.stat().st_mtime < gguf.stat().st_mtime:
        compile_model(gguf, artifact)
    requests = session(options.turns, options.tokens)
    session_of = {
        "shape": shape.name,
        "layers": [shape.num_layers, whole.num_layers],
        "decode_scale": whole.bytes_per_token / shape.bytes_per_token,
        "num_reply_tokens": NUM_REPLY_TOKENS,
        "num_turns": options.turns,
        "num_tokens": options.tokens,
    }
    before = before_of(session_of, read_results("session")) if options.add else {}
    missing = {name: why for name, why in before.get("missing", {}).items() if name not in options.servers}
    ways: dict[str, dict[str, list[Json]]] = before.get("ways", {})
    taken: dict[str, dict[str, float]] = before.get("taken_by_others", {})
    places = {name: path.resolve() for name, path in PLACES.items()}
    for way in options.ways:
        with tempfile.TemporaryDirectory(dir=cache / "sizes") as scratch:
            for server in servers_of(gguf, artifact, places, options.tokens + _ROOM, NUM_REPLY_TOKENS, Path(scratch)):
                if server.name in options.servers and server.name not in missing:
                    others = [Answer(**each) for each in next(iter(ways.get(way, {}).values()), ())]
                    try:
                        since = CPUTime.now()
                        found = play_session(server, requests, way)
                        check_prompts(found, others or found)
                        ways.setdefault(way, {})[server.name] = list(map(asdict, found))
                        taken.setdefault(way, {})[server.name] = since.taken_by_others()
                    except Exception as error:
                        if server.name == OURS:
                            raise
                        missing[server.name] = f"{type(error).__name__}: {error}"[:300]
                        print(f"{server.name}: {missing[server.name]}", file=sys.stderr)
    in_order = {way: {name: ways[way][name] for name in SERVERS if name in ways[way]} for way in WAYS if ways.get(way)}
    figures = {**session_of, "missing": missing, "taken_by_others": taken, "ways": in_order}
    figures["earlier"] = origins_before(before)
    publish("session", figures)
    PICTURE.write_text(picture(figures), encoding="utf-8")


def before_of(session_of: Json, before: Json | None) -> Json:
    """Return the results of an earlier run of the same session, `before`; none if there are none.

    Raises:
        ValueError: they belong to another session.
    """
    if before is None:
        return {}
    for name, value in session_of.items():
        if before[name] != (float(f"{value:.4g}") if isinstance(value, float) else value):
            raise ValueError(f"{name} is {value}, and {before[name]} in the results: measure it without --add")
    return before


def play_session(server: AgentsServer, requests: Sequence[Request], way: str) -> list[Answer]:
    """Send a session's requests to a server in one of `WAYS`; return the measured answers, in order.

    Unless the way is `whole`, the server is restarted before the middle request: killed, or unloaded.
    """
    restart_at = None if way == "whole" else middle(requests)
    answers: list[Answer] = []
    process = _start_server(server)
    try:
        for number, request in enumerate(requests):
            asked_at = time.perf_counter()
            if number == restart_at:
                if way == "unloaded":
                    server.before_end(process.port)
                    process.close()
                    asked_at = time.perf_counter()  # no request waited until then
                else:
                    process.kill()
                    process.close()
                process = _start_server(server)
                if way == "unloaded":
                    server.after_start(process.port)
            answers.append(_send(process.port, request, server.fields, asked_at))
            print(f"{server.name}, {way}, {number}: {answers[-1]}", file=sys.stderr)
    finally:
        process.close()
    return answers


def check_prompts(answers: Sequence[Answer], others: Sequence[Answer]) -> None:
    """Raise ValueError if a server computed other prompts: ik_llama.cpp truncates those that exceed its context."""
    for number, (answer, other) in enumerate(zip(answers, others, strict=True)):
        if abs(answer.num_prompt - other.num_prompt) > _SAME * other.num_prompt:
            raise ValueError(
                f"prompt {number} has {answer.num_prompt} tokens, and {other.num_prompt} for another server"
            )


def middle(requests: Sequence[Request]) -> int:
    """Return the index of the request in the middle of the main conversation, before which the server is restarted."""
    places = [number for number, request in enumerate(requests) if request.agent == 0]
    return places[len(places) // 2]


def _start_server(server: AgentsServer) -> ServedProcess:
    """Start a server, and return once it is ready."""
    return ServedProcess(server.command, starts_within_s=_STARTS_WITHIN_S, ready_path=server.ready_path)


def _send(port: int, request: Request, fields: Json, asked_at: float) -> Answer:
    """Send a request, and return its times, from `asked_at` on, and the numbers of its prompt and cached tokens.

    Each request has a connection of its own, because some servers close it after a stream.

    Raises:
        ValueError: the reply is not `NUM_REPLY_TOKENS` long.
    """
    with closing(Client(port)) as client:
        events = client.events(request.path, {**request.body, **_FIXED, **fields})
    ended_at = time.perf_counter()
    usage = next(event.data["usage"] for event in reversed(events) if event.data.get("usage"))
    if usage["completion_tokens"] != NUM_REPLY_TOKENS:
        raise ValueError(f"a reply has {usage['completion_tokens']} tokens, {NUM_REPLY_TOKENS} were asked for")
    first = next(event.at for event in events if _has_token(event))
    num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(request.agent, first - asked_at, ended_at - asked_at, usage["prompt_tokens"], num_cached)


def _has_token(event: Event) -> bool:
    deltas: list[dict[str, Any]] = [choice.get("delta") or {} for choice in event.data.get("choices", ())]
    return any(delta.get(kind) for delta in deltas for kind in ("content", "reasoning_content", "tool_calls"))


if __name__ == "__main__":
    main()
