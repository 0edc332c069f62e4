"""mlc-llm #2766: 50 requests at once, and the server was dead: one of them popped 304 tokens of 202, its engine thread
ended, the process stayed and nothing told. Here some of the 50 are invalid, one pops too much, some leave, and pages
are few: only what must fail fails, `/health` is ready, and the next request works.
"""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest
from radixlm.runtime.engine.request import Request
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.model.batch import Float32Array

from ..runtime.fake_model import alone
from ..runtime.server.real_server import CHAT, VOCAB_SIZE, WAIT_S, RealServer, real_server

GREEDY: dict[str, Any] = {"temperature": 0, "return_token_ids": True}
INVALID: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": [{"role": "user", "content": "once there was a very old man " * 60}]},
    {"n": 10**9},
    {"logit_bias": {"100000": 1}},
    {"temperature": "hot"},
]
POPS_TOO_MUCH = 4242  # the seed of the request that does


def body(number: int) -> dict[str, Any]:
    content = f"once there was number {number % 7} and {number}"
    fields = {"messages": [{"role": "user", "content": content}], "max_tokens": 10 + number % 30, "seed": number}
    return CHAT | GREEDY | fields


def expected(server: RealServer, reply: dict[str, Any], max_tokens: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)

    def unpad(logits: Float32Array) -> None:
        logits[:, server.engine.tokenizer.vocab_size :] = -1e9  # no tokens

    ids = reply["prompt_token_ids"]
    return list(alone(ids, params, context_length=256, vocab_size=VOCAB_SIZE, after=unpad))


@pytest.fixture
def popping(monkeypatch: pytest.MonkeyPatch) -> None:
    with_readings = Request.with_readings

    def readings_or_pop(self: Request, *args: Any) -> Any:
        if self.spec.params.seed == POPS_TOO_MUCH and self.num_generated > 3:
            self.admitted.pop(304)
        return with_readings(self, *args)

    monkeypatch.setattr(Request, "with_readings", readings_or_pop)


def test_50_concurrent_requests_of_which_some_are_invalid(popping: None) -> None:
    answers: dict[int, httpx.Response] = {}
    left: list[int] = []

    def ask(server: RealServer, number: int) -> None:
        if number % 10 == 3:
            answers[number] = server.chat(**body(number) | INVALID[number // 10])
        elif number % 10 == 6:
            with server.send(**body(number) | {"stream": True, "max_tokens": 200}) as connection:
                connection.recv(10)
            left.append(number)
        elif number == 25:
            answers[number] = server.chat(**body(number) | {"seed": POPS_TOO_MUCH})
        else:
            answers[number] = server.chat(**body(number))

    with real_server(num_pages=24, max_num_seqs=16, context_length=256) as server:
        threads = [threading.Thread(target=ask, args=(server, number), daemon=True) for number in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert len(answers) + len(left) == 50, "some were never answered"
        for number, answer in answers.items():
            if number % 10 == 3:
                assert answer.status_code == 400, answer.text
            elif number == 25:
                assert answer.status_code == 500
            else:
                assert answer.status_code == 200, answer.text
                (choice,) = answer.json()["choices"]
                assert choice["token_ids"] == expected(server, answer.json(), 10 + number % 30), number
        assert server.engine.stats().failed_by_type == {"PopLengthError": 1}
        health = server.get("/health").json()
        assert (health["status"], health["num_failed_steps"]) == ("ready", 0)
        reply = server.chat(**body(1)).json()
        assert reply["choices"][0]["token_ids"] == expected(server, reply, 11)
        server.check()
