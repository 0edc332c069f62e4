"""Replies may be asked for in many ways, which agree; what is wrong is refused by name, and what fails is named."""

from __future__ import annotations

import asyncio
import os
import pydoc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from radixlm.runtime.engine.calls.batch import PromptResult
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import EmptyPrompt, EngineError, InvalidArgument, InvalidRequest

from ...fake_artifact import FakeArtifact
from ..test_engine import MESSAGES, artifact, open_engine  # noqa: F401  # the first is a fixture

PARAMS = SamplingParams(seed=1, max_tokens=6, ignore_eos=True)
SAME: Any = {"seed": 1, "max_tokens": 6, "ignore_eos": True, "temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0}
PROMPTS: list[Any] = ["Once", [1, 2, 3], MESSAGES, "", "The capital of France is", [{"role": "bot", "content": "x"}]]


@pytest.fixture
def engine(artifact: FakeArtifact) -> Iterator[Engine]:  # noqa: F811
    with open_engine(artifact) as engine:
        yield engine


def test_parameters_are_given_in_three_ways(engine: Engine) -> None:
    wanted = engine.generate("Once", PARAMS).token_ids
    assert engine.generate("Once", SAME).token_ids == engine.generate("Once", **SAME).token_ids == wanted
    assert engine.chat(MESSAGES, **SAME).token_ids == engine.chat(MESSAGES, PARAMS).token_ids
    assert len(engine.generate("Once", PARAMS, max_tokens=2).token_ids) == 2
    assert engine.generate("Once", PARAMS, stop=["\n"]).text == engine.generate("Once", PARAMS, stop=("\n",)).text


def test_a_field_that_is_not_given_is_the_engine_s(engine: Engine) -> None:
    own = engine.default_params
    assert own != SamplingParams()
    wanted = engine.generate("Once", SamplingParams.recommended(own.defaults), seed=1, max_tokens=6).token_ids
    assert engine.generate("Once", seed=1, max_tokens=6).token_ids == wanted
    assert engine.generate("Once", {"seed": 1, "max_tokens": 6}).token_ids == wanted


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda engine: engine.generate(None), "prompt is None; it must be text, a list of token ids"),
        (lambda engine: engine.generate(b"x"), "prompt is b'x'; it must be text"),
        (lambda engine: engine.generate(MESSAGES), "chat.. takes messages"),
        (lambda engine: engine.stream(7), "prompt is 7; it must be text"),
        (lambda engine: engine.stream(["a", "b"]), "one prompt: pass several to generate.. or generate_many.., or run"),
        (lambda engine: asyncio.run(engine.agenerate([[1], [2]])), "one prompt: .* with asyncio.gather"),
        (lambda engine: engine.chat("Hi"), "messages is 'Hi'; it must be a list of .*generate.. takes text"),
        (lambda engine: engine.chat(None), "messages is None; it must be a list"),
        (lambda engine: engine.chat(MESSAGES[0]), "messages is {'role': 'user'.*; it must be a list"),
        (lambda engine: engine.generate_many("Hi"), "prompts is 'Hi'; it must be a list or iterator"),
        (lambda engine: engine.generate_many(["Hi"], max_token=1), "did you mean max_tokens"),
        (lambda engine: asyncio.run(engine.agenerate(None)), "prompt is None; it must be text"),
        (lambda engine: Engine(None), "model is None; it must be a model"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_argument_is_a_type_error_that_names_it(engine: Engine, ask: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(TypeError, match=says) as raised:
        ask(engine)
    assert isinstance(raised.value, InvalidArgument)


@pytest.mark.parametrize("message", [{"role": "bot", "content": "x"}, {"content": "x"}, {"role": 5, "content": "x"}])
def test_a_role_that_is_none_is_refused(engine: Engine, message: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"a message's role is .*; use one of system, developer, user"):
        engine.chat([*MESSAGES, message], PARAMS)


def test_of_several_prompts_the_one_that_fails_is_named(engine: Engine) -> None:
    with pytest.raises(EmptyPrompt, match=r"^prompt 1: the prompt is empty"):
        engine.generate(["Once", "", "Twice"], PARAMS)
    with pytest.raises(InvalidRequest, match=r"^prompt 1: a message's role is 'bot'"):
        engine.chat([MESSAGES, [{"role": "bot", "content": "x"}]], PARAMS)


def test_many_prompts_end_with_what_each_gives_alone_or_with_its_error(engine: Engine) -> None:
    results = {result.index: result for result in engine.generate_many(iter(PROMPTS), PARAMS)}
    assert [results[index].prompt for index in range(len(PROMPTS))] == PROMPTS
    assert results[0].text == engine.generate("Once", PARAMS).text
    assert results[1].completion is not None and results[2].completion is not None
    assert results[1].completion.token_ids == engine.generate([1, 2, 3], PARAMS).token_ids
    assert results[2].completion.token_ids == engine.chat(MESSAGES, PARAMS).token_ids
    assert {index for index, result in results.items() if result.error is not None} == {3, 5}
    with pytest.raises(EmptyPrompt, match=r"^prompt 3: the prompt is empty"):
        print(results[3].text)


def test_prompts_are_taken_as_there_is_room_and_left_when_the_loop_is(engine: Engine) -> None:
    taken: list[int] = []

    def prompts() -> Iterator[list[int]]:
        for number in range(10_000):
            taken.append(number)
            yield [1, 2, number % 100]

    many = engine.generate_many(prompts(), PARAMS)
    assert taken == []
    first = next(many)
    assert isinstance(first, PromptResult) and first.error is None
    assert len(taken) <= 16  # twice max_num_seqs
    many.close()  # type: ignore[attr-defined]
    engine.check()
    assert engine.stats().num_running == engine.stats().num_waiting == 0


def test_progress_is_told_on_standard_error(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(list(engine.generate_many(["Once", "", "Twice"], PARAMS, progress=True))) == 3
    assert capsys.readouterr().err.splitlines()[-1] == "3/3 prompts, 12 tokens, 1 failed"


def test_replies_can_be_awaited_and_engines_and_streams_entered(artifact: FakeArtifact) -> None:  # noqa: F811
    async def ask() -> None:
        async with open_engine(artifact) as engine:
            replies = await asyncio.gather(
                engine.agenerate("Once", PARAMS), engine.achat(MESSAGES, PARAMS), engine.agenerate([1, 2], PARAMS)
            )
            wanted = engine.generate("Once", PARAMS), engine.chat(MESSAGES, PARAMS), engine.generate([1, 2], PARAMS)
            assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in wanted]
            async with engine.stream("Once", PARAMS, max_tokens=None) as stream:
                async for _ in stream:
                    break
            engine.check()
            assert engine.stats().num_running == 0
        with pytest.raises(EngineError):
            await engine.agenerate("Once", PARAMS)

    asyncio.run(ask())


def test_a_cancelled_wait_ends_its_request(engine: Engine) -> None:
    async def ask() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await engine.agenerate([1, 2], PARAMS, max_tokens=None)

    asyncio.run(ask())
    engine.check()
    assert engine.stats().num_running == engine.stats().num_waiting == 0


def test_a_forked_child_is_told_at_once_by_each_call(engine: Engine) -> None:
    uses: list[Callable[[], Any]] = [
        lambda: engine.generate("Once", PARAMS),
        lambda: engine.chat(MESSAGES, PARAMS),
        lambda: engine.stream("Once"),
        lambda: engine.generate(["Once", "Twice"]),
        lambda: engine.generate_many(["Once"]),
        lambda: asyncio.run(engine.agenerate("Once")),
        lambda: engine.stats(),
        lambda: engine.cache_tree(),
    ]
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            for use in uses:
                with pytest.raises(EngineError, match="belongs to process"):
                    use()
            engine.close()
            os.write(writer, b"told")
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    assert os.read(reader, 9) == b"told"
    assert engine.generate("Once", PARAMS).finish_reason == "length"


def test_what_is_printed_is_one_short_line(engine: Engine) -> None:
    completion, stream = engine.generate("Once", PARAMS), engine.stream("Once", PARAMS)
    shown = [repr(each) for each in (engine, completion, stream)]
    assert all("\n" not in line and len(line) < 200 for line in shown)
    assert f"context of {engine.context_length} tokens" in shown[0] and "open" in shown[0]
    assert "6 tokens after 1, of which" in shown[1]
    engine.close()
    assert "closed" in repr(engine)


def test_help_has_the_calls_and_what_they_take() -> None:
    told = pydoc.plain(pydoc.render_doc(Engine))
    assert all(f" {name}(" in told for name in ("generate", "achat", "generate_many", "stream_chat"))
    assert "response_format" in told
