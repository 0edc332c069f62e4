"""Measure opencode's first and second question to a real model, compared with llama.cpp's server on the same file.

    python -m bench.agents.questions ARTIFACT [--rounds 3] [--llama-cpp .cache/llama.cpp] [--opencode PROGRAM]

ARTIFACT is Qwen2.5-Coder-0.5B, compiled from the Q4_K_M file that llama.cpp gets. The requests are recorded with the
real client, once, and sent as it sends them, one after the other: for the first question one for a title and one with
all instructions and tools, for the second one with the first reply in its history. Replies are streams of 64 greedy
tokens. Each round has fresh servers with their defaults, in turns; their start does not count. Six minutes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.cpu import default_num_threads

from ..options import read_options
from ..peers.models import qwen_coder
from ..processes import RADIXLM
from ..report.page import publish
from ..served import Client, Event, Json, ServedProcess
from .recorder import MODEL, recorded

NUM_REPLY_TOKENS = 64
BARS = (4.0, 1.3)  # speedups required for the first and the second question
OURS, PEER = "radixlm", "llama.cpp"
_OPENCODE = Path(".cache/npm-agents/node_modules/opencode-linux-x64/bin/opencode")
_KEPT = Path(".cache/bench/opencode.json")
_GREEDY = {"max_tokens": NUM_REPLY_TOKENS, "temperature": 0}
_WHOLE_LENGTH: Mapping[str, Json] = {OURS: {"min_tokens": NUM_REPLY_TOKENS}, PEER: {"ignore_eos": True}}
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def main() -> None:
    """Send opencode's two questions to each server, print the seconds, and write `results/questions.json`."""
    options = read_options(__doc__, "artifact", rounds=3, llama_cpp=Path(".cache/llama.cpp"), opencode=_OPENCODE)
    questions = recorded(options.opencode.absolute(), _KEPT)
    threads = default_num_threads()
    llama_server = [str(options.llama_cpp.resolve() / "llama-server"), "--model", str(qwen_coder()), "--jinja"]
    commands = {
        OURS: [RADIXLM, "serve", str(Artifact.open(options.artifact).path), "--model-id", MODEL],
        PEER: [*llama_server, "--threads", str(threads)],
    }
    rounds: list[Mapping[str, Any]] = []
    for number in range(options.rounds):
        order = list(commands)[:: -1 if number % 2 else 1]
        rounds.append({name: measure_questions(commands[name], questions, _WHOLE_LENGTH[name]) for name in order})
        print(rounds[-1], file=sys.stderr)
    publish("questions", figures(rounds))


def measure_questions(command: Sequence[str], questions: Sequence[Sequence[Json]], fields: Json) -> list[Json]:
    """Send both questions to a fresh server; return a row for each, with the sums over its requests.

    A row has `seconds`, `num_prompt_tokens` and `num_cached_tokens`.

    Args:
        questions: the bodies of each question's requests, as recorded.
        fields: of each request, so that all replies are equally long.
    """
    asked: list[Json] = []
    reply = ""
    with ServedProcess(command) as server:
        for bodies in questions:
            start = time.perf_counter()
            streams = [_stream_chat(server.port, {**_sent(body, reply), **fields}) for body in bodies]
            seconds = time.perf_counter() - start
            reply = "".join(map(_content, streams[-1]))
            usages = [_usage(events) for events in streams]
            num_prompt = sum(usage["prompt_tokens"] for usage in usages)
            num_cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
            asked.append({"seconds": seconds, "num_prompt_tokens": num_prompt, "num_cached_tokens": num_cached})
    return asked


def figures(rounds: Sequence[Mapping[str, Sequence[Json]]]) -> Json:
    """Return a row for each question: seconds and speedup of each round, whether the median meets its bar, tokens."""
    rows = []
    for number, bar in enumerate(BARS):
        seconds = {name: [each[name][number]["seconds"] for each in rounds] for name in (OURS, PEER)}
        ratios = [theirs / ours for ours, theirs in zip(seconds[OURS], seconds[PEER], strict=True)]
        last = {name: rounds[-1][name][number] for name in (OURS, PEER)}
        ratio = statistics.median(ratios)
        rows.append({"seconds": seconds, "ratios": ratios, "bar": bar, "is_met": ratio >= bar, "tokens": last})
    return {"num_reply_tokens": NUM_REPLY_TOKENS, "rows": rows}


def _stream_chat(port: int, body: Json) -> list[Event]:
    """Send a request on its own connection, because llama.cpp closes it after a stream, slightly too late to see."""
    with closing(Client(port)) as client:
        return client.events("/v1/chat/completions", body)


def _sent(body: Json, reply: str) -> Json:
    """Return a recorded body, with the length of its reply, and with the previous reply in its history."""
    messages = [{**each, "content": reply} if each["role"] == "assistant" else each for each in body["messages"]]
    return {**body, "messages": messages, **_GREEDY, **_STREAMED}


def _content(event: Event) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event.data["choices"])


def _usage(events: Sequence[Event]) -> Json:
    """Return the usage at the end of a stream.

    Raises:
        ValueError: the reply has another length than was asked for.
    """
    found: Json = next(event.data["usage"] for event in reversed(events) if event.data.get("usage"))
    if found["completion_tokens"] != NUM_REPLY_TOKENS:
        raise ValueError(f"a reply has {found['completion_tokens']} tokens, {NUM_REPLY_TOKENS} were asked for")
    return found


if __name__ == "__main__":
    main()
