"""The clients of the load test: what they ask for, what they take for an answer, and how it is shown."""

from __future__ import annotations

import json
from typing import Any

import pytest
from radixlm.runtime.artifact.manifest import ModuleInfo

from bench.load.clients import percentiles
from bench.load.replies import Reply, ReplyError, check_usage
from bench.load.requests import Facts, Stream
from bench.load.server import compute_widest_step

from ...runtime.fake_model import Bench

FACTS = Facts("m", context_length=512, vocab_size=300, is_chat=True)


def test_a_seed_gives_the_same_requests_and_another_one_others() -> None:
    def calls(seed: int) -> list[bytes]:
        stream = Stream(7, seed, FACTS)
        return [stream.next().call.encoded() for _ in range(50)]

    assert calls(1) == calls(1) != calls(2)


def test_requests_are_of_all_kinds_and_good_ones_fit_the_context() -> None:
    kinds, endings = set(), set()
    for number in range(20):
        stream = Stream(number, 0, FACTS)
        for _ in range(60):
            ask = stream.next()
            kinds.add(ask.kind)
            endings.add(ask.ending)
            if ask.messages:
                stream.add_reply(ask, "yes", 100)
            if ask.is_good:
                body = json.loads(ask.call.body)
                prompt = body.get("prompt") or "".join(message["content"] for message in body["messages"])
                assert (
                    len(prompt if isinstance(prompt, list) else prompt.encode()) < FACTS.context_length or ask.messages
                )
                assert body["max_tokens"] == ask.params["max_tokens"]
    assert endings == {"read", "leave before the first token", "leave in mid-stream", "leave in mid-request"}
    good = {kind for kind in kinds if not kind.startswith("bad")}
    assert {"ids", "fills the context", "chat, next turn", "chat, shared prefix", "text, fresh prefix"} <= good
    assert len(kinds - good) > 20


def chunk(text: str = "a", reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": reason, "token_ids": [5], "index": 0}], **more}


def test_chunks_become_a_reply_whose_counts_must_agree() -> None:
    reply = Reply()
    usage = {"prompt_tokens": 2, "completion_tokens": 2}
    assert reply.take(chunk()) and reply.take(chunk("b", "stop", prompt_token_ids=[1, 2]))
    assert not reply.take({"choices": [], "usage": usage})
    with pytest.raises(ReplyError, match="DONE"):
        reply.check_complete(is_stream=True)
    reply.is_done = True
    reply.check_complete(is_stream=True)
    check_usage([reply])
    assert (reply.text, reply.token_ids, reply.prompt_token_ids) == ("ab", [5, 5], [1, 2])
    reply.token_ids.append(5)
    with pytest.raises(ReplyError, match="usage"):
        check_usage([reply])


def test_each_choice_takes_its_own() -> None:
    replies = [Reply(0), Reply(1)]
    other = {"choices": [{"delta": {"content": "x"}, "finish_reason": None, "token_ids": [6], "index": 1}]}
    assert [[reply.take(body) for reply in replies] for body in (chunk(), other)] == [[True, False], [False, True]]
    assert [(reply.text, reply.token_ids) for reply in replies] == [("a", [5]), ("x", [6])]


def test_an_error_in_mid_stream_and_news_after_the_end_are_faults() -> None:
    with pytest.raises(ReplyError, match="an error instead"):
        Reply().take({"error": {"message": "no"}})
    reply = Reply()
    reply.take(chunk(reason="length"))
    with pytest.raises(ReplyError, match="after its finish_reason"):
        reply.take(chunk())


def test_percentiles_are_of_what_was_seen() -> None:
    assert percentiles([float(i) for i in range(101)]) == {"p50": 50.0, "p99": 99.0, "max": 100.0}
    assert percentiles([]) == {"p50": 0.0, "p99": 0.0, "max": 0.0}


@pytest.mark.parametrize("num_states", [0, 8])
@pytest.mark.parametrize(("most", "expected"), [((64, 16), (64, 16)), ((512, 300), (96, 96)), ((40, 50), (40, 40))])
def test_before_clients_come_a_step_is_as_wide_as_any(
    num_states: int, most: tuple[int, int], expected: tuple[int, int]
) -> None:
    """Memory that is first touched late in the load counted as growth."""
    bench, widest = Bench(num_pages=16, num_states=num_states), []
    bench.model.before = lambda batch: widest.append((batch.shape[0], batch.shape[3]))
    module = ModuleInfo(
        entry_points=(),
        max_num_tokens=most[0],
        max_num_logits=most[1],
        workspace_bytes=0,
        top_logits_scratch=1,
        weights_bytes=0,
    )
    compute_widest_step(bench.core, module)
    assert widest == [expected]
    bench.core.check()
    assert bench.cache.pool.num_free == 16
    assert bench.cache.states is None or bench.cache.states.num_free == num_states - 1
