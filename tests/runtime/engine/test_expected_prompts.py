"""What the next prompt begins with is computed while nothing else is to be done, on free pages, and is exact."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.chat.follow_up_turns import FollowUpTurns
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import InvalidRequest
from radixlm.runtime.model.scripted_runner import ScriptedRunner
from radixlm.runtime.prefix.expected_prompts import MAX_EXPECTED, ExpectedPrompt, ExpectedPrompts
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

from ..fake_artifact import fake_artifact
from ..fake_model import CONTEXT_LENGTH, Bench, alone
from ..fake_tier import processes
from ..server.scripted import END_OF_TURN, TOKENIZER, VOCAB_SIZE
from ..thought_templates import HYBRID, OPENED

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
EXPECTED = tuple(range(3, 33)) + tuple(range(5, 35))  # 60 ids


def at_once(work: Callable[[], None]) -> None:
    work()


def expectations(bench: Bench, *, aside: Callable[[Callable[[], None]], object] = at_once) -> ExpectedPrompts:
    return ExpectedPrompts(
        bench.model,
        bench.cache,
        context_length=CONTEXT_LENGTH,
        max_num_tokens=24,
        clock=lambda: bench.now,
        aside=aside,
        post=at_once,
    )


def run(bench: Bench, expected: ExpectedPrompts, most: int = 100) -> int:
    """The pieces that it took."""
    for number in range(most):
        if not expected.has_work:
            return number
        expected.run()
        bench.core.check()
    raise AssertionError("it does not end")


@pytest.mark.parametrize("num_known", [0, 7, 16, 35])
def test_a_prompt_that_was_expected_is_found_and_its_reply_is_the_same(num_known: int) -> None:
    bench = Bench(num_pages=24)
    if num_known:
        bench.add("before", EXPECTED[:num_known], GREEDY)
        bench.run()
    expected = expectations(bench)
    expected.add(ExpectedPrompt(b"", lambda: EXPECTED))
    assert run(bench, expected) > 2
    assert len(EXPECTED) - num_known <= expected.num_tokens <= len(EXPECTED)
    ids = (*EXPECTED, 7, 8)
    request = bench.add("next", ids, GREEDY)
    bench.run()
    assert request.reuse.num_tokens == len(EXPECTED)
    assert bench.tokens("next") == alone(ids, GREEDY)


def test_what_is_cached_is_not_computed_again_and_less_than_a_page_is_not_worth_a_step() -> None:
    bench = Bench(num_pages=24)
    bench.add("before", EXPECTED[: len(EXPECTED) - PAGE_SIZE], GREEDY)
    bench.run()
    computed = bench.model.num_tokens
    expected = expectations(bench)
    expected.add(ExpectedPrompt(b"", lambda: EXPECTED[:-1]))
    run(bench, expected)
    assert (bench.model.num_tokens, expected.num_tokens) == (computed, 0)


def test_nothing_is_evicted_for_what_may_come() -> None:
    bench = Bench(num_pages=7)
    kept = tuple(range(20, 36)) * 5
    bench.add("kept", kept, SamplingParams(temperature=0.0, max_tokens=1))
    bench.run()
    assert bench.cache.pool.num_free < 3
    expected = expectations(bench)
    expected.add(ExpectedPrompt(b"", lambda: EXPECTED))
    run(bench, expected)
    assert expected.num_tokens <= 32
    assert bench.cache.match((*kept, 1)).num_tokens == len(kept)


def test_a_request_that_comes_between_two_pieces_is_computed_and_the_rest_after_it() -> None:
    bench = Bench(num_pages=24)
    expected = expectations(bench)
    expected.add(ExpectedPrompt(b"", lambda: EXPECTED))
    expected.run()
    expected.run()
    num_tokens = expected.num_tokens
    assert 0 < num_tokens < len(EXPECTED)
    ids = (*EXPECTED, 9)
    request = bench.add("next", ids, GREEDY)
    bench.run()
    assert request.reuse.num_tokens == num_tokens and bench.tokens("next") == alone(ids, GREEDY)
    run(bench, expected)
    assert expected.num_tokens == num_tokens, "the request has computed the rest"


def test_a_namespace_that_is_forgotten_expects_nothing() -> None:
    bench = Bench(num_pages=24)
    expected = expectations(bench)
    for namespace in (b"a", b"b"):
        expected.add(ExpectedPrompt(namespace, lambda: EXPECTED))
    expected.run()  # the newest has begun
    expected.forget(b"b")
    assert expected.has_work
    run(bench, expected)
    assert bench.cache.match((*EXPECTED, 1), namespace=b"a").num_tokens == len(EXPECTED)
    assert bench.cache.match((*EXPECTED, 1), namespace=b"b").num_tokens == 0


def test_only_so_many_are_remembered_and_what_fails_is_dropped() -> None:
    bench = Bench(num_pages=24)
    expected = expectations(bench)
    made: list[int] = []

    def fail(number: int) -> tuple[int, ...]:
        made.append(number)
        raise ValueError("no such text")

    for number in range(MAX_EXPECTED + 5):
        expected.add(ExpectedPrompt(b"", lambda number=number: fail(number)))  # type: ignore[misc]
    while expected.has_work:
        expected.run()
    assert made == list(range(MAX_EXPECTED + 4, 4, -1)), "the newest first"


def test_while_ids_are_made_the_engines_thread_has_nothing_to_do_for_them() -> None:
    bench, elsewhere = Bench(num_pages=24), list[Callable[[], None]]()
    expected = expectations(bench, aside=elsewhere.append)
    expected.add(ExpectedPrompt(b"", lambda: EXPECTED))
    expected.add(ExpectedPrompt(b"", lambda: EXPECTED[:40]))
    expected.run()
    assert not expected.has_work and expected.num_tokens == 0
    elsewhere.pop()()
    run(bench, expected)
    assert expected.num_tokens == 40, "the newest; the other one is being made"
    elsewhere.pop()()
    run(bench, expected)
    assert expected.num_tokens == len(EXPECTED)


@pytest.mark.parametrize("namespace", [b"a", None])
def test_what_is_forgotten_while_its_ids_are_made_is_not_computed(namespace: bytes | None) -> None:
    bench, elsewhere = Bench(num_pages=24), list[Callable[[], None]]()
    expected = expectations(bench, aside=elsewhere.append)
    expected.add(ExpectedPrompt(b"a", lambda: EXPECTED))
    expected.run()
    expected.start_over() if namespace is None else expected.forget(namespace)
    elsewhere.pop()()
    assert not expected.has_work


def test_what_there_was_no_time_for_is_forgotten_like_all_that_is_unused() -> None:
    bench = Bench(num_pages=24)
    expected = expectations(bench)
    expected.add(ExpectedPrompt(b"", lambda: EXPECTED))
    bench.now += 5
    expected.add(ExpectedPrompt(b"", lambda: EXPECTED[:40]))
    expected.drop_unused(bench.now - 1)
    run(bench, expected)
    assert expected.num_tokens == 40


@pytest.mark.parametrize("has_ids", [False, True])
def test_what_was_begun_long_ago_is_forgotten_like_what_waits(has_ids: bool) -> None:
    """On a busy server a prompt's ids were kept longer than `--cache-ttl`, and computed in the end."""
    bench, elsewhere = Bench(num_pages=24), list[Callable[[], None]]()
    expected = expectations(bench, aside=elsewhere.append)
    expected.add(ExpectedPrompt(b"", lambda: EXPECTED))
    expected.run()
    if has_ids:
        elsewhere.pop()()
    expected.drop_unused(bench.now + 1)
    for late in elsewhere:
        late()
    assert expected.is_done and expected.num_tokens == 0


def test_a_template_that_refuses_the_next_turn_is_no_failure() -> None:
    def refuse() -> tuple[int, ...]:
        raise InvalidRequest("roles must alternate")

    expected = expectations(Bench(num_pages=24))
    expected.add(ExpectedPrompt(b"", refuse))
    expected.run()
    assert not expected.has_work


def test_the_thread_does_not_spin_for_what_may_come_while_requests_wait_for_the_disk(tmp_path: Path) -> None:
    with processes(tmp_path) as serve:
        served = serve()
        served.bench.add("cold", EXPECTED, GREEDY)
        served.run()
        served.settle()
        served = serve(aside=at_once)
        served.settle()
        core, expected = served.bench.core, served.bench.expected
        assert expected is not None
        served.store.may_read.clear()
        served.bench.add("waits", EXPECTED, GREEDY)
        expected.add(ExpectedPrompt(b"", lambda: (1, *EXPECTED)))
        assert core.num_waiting == 1 and core.wait_s != 0.0
        served.bench.step()
        assert expected.num_tokens == 0 and expected.has_work
        served.store.may_read.set()
        served.run()
        assert core.wait_s == 0.0
        run(served.bench, expected)
        assert expected.num_tokens == 61


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    bench = Bench(num_pages=24)
    expected = expectations(bench)
    expected.add(ExpectedPrompt(b"", lambda: EXPECTED))
    expected.run()

    def fail(batch: Any) -> None:
        raise RuntimeError("broken")

    bench.model.before = fail
    with pytest.raises(RuntimeError):
        expected.run()
    bench.core.check()
    assert not expected.has_work and bench.cache.match((*EXPECTED, 1)).num_tokens == 0


PLAIN = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
THOUGHT = "Let me think about this for a while, as long as it takes, and then for a little longer. " * 2
ANSWER = "The capital of Norway is Oslo, which lies at the end of a fjord, and was once called Christiania. " * 2
FIRST = {"role": "user", "content": "What is the capital of Norway?"}
SECOND = {"role": "user", "content": "And of Sweden?"}


@pytest.fixture
def engine_of() -> Iterator[Callable[..., tuple[Engine, ScriptedRunner]]]:
    engines: list[Engine] = []

    def make(template: str, **options: Any) -> tuple[Engine, ScriptedRunner]:
        runner = ScriptedRunner(VOCAB_SIZE)
        artifact = fake_artifact(
            TOKENIZER, template, vocab_size=VOCAB_SIZE, bos_token_id=1, eos_token_id=END_OF_TURN, context_length=1024
        )
        options = {"max_num_seqs": 8, **options}
        engines.append(Engine(artifact, open_runner=lambda _, __, ___: runner, **options))  # type: ignore[arg-type]
        return engines[-1], runner

    yield make
    for engine in engines:
        engine.close()


def settle(engine: Engine) -> int:
    """Wait until nothing is done; the tokens that were computed without a request."""
    for _ in range(200):
        if engine._loop.call(lambda core: core.expected is None or core.expected.is_done):
            break
        time.sleep(0.05)
    engine.check()
    return engine.stats().num_idle_tokens


def say(engine: Engine, runner: ScriptedRunner, text: str) -> None:
    runner.script.clear()
    runner.script.extend([*engine.encode(text, add_bos=False), END_OF_TURN])


@pytest.mark.parametrize("idle_work", [True, False])
def test_the_turn_after_a_thought_that_the_template_drops_finds_the_answer(engine_of: Any, idle_work: bool) -> None:
    engine, runner = engine_of(OPENED, idle_work=idle_work)
    params = SamplingParams(temperature=0.0, max_tokens=200)
    say(engine, runner, f"{THOUGHT}\n</think>{ANSWER}")
    first = engine.chat([FIRST], params)
    assert first.thought.strip() == THOUGHT.strip() and first.text == ANSWER
    num_idle = settle(engine)
    say(engine, runner, "Stockholm.")
    history = [FIRST, {"role": "assistant", "content": ANSWER}, SECOND]
    second = engine.chat(history, params)
    num_new = second.usage.prompt_tokens - second.usage.cached_tokens
    num_answer = len(engine.encode(ANSWER, add_bos=False))
    if idle_work:
        assert num_answer <= num_idle < num_answer + 20
        assert num_new < 15, "the question, and no more"
    else:
        assert num_idle == 0 and num_new > num_answer


def test_each_of_several_replies_to_one_request_is_gone_on_from_once(
    engine_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runner = engine_of(OPENED, max_num_seqs=1)  # one after the other, as the script has them
    added: list[ExpectedPrompt] = []
    add = ExpectedPrompts.add
    monkeypatch.setattr(ExpectedPrompts, "add", lambda self, prompt: (added.append(prompt), add(self, prompt)))
    answers = [ANSWER, ANSWER.replace("Oslo", "Bergen")]
    runner.script.clear()
    for answer in answers:
        runner.script.extend([*engine.encode(f"{THOUGHT}\n</think>{answer}", add_bos=False), END_OF_TURN])
    with TestClient(create_app(engine)) as client:

        def asked(messages: list[Any], **fields: object) -> Any:
            body = {"messages": messages, "temperature": 0, "max_tokens": 200, **fields}
            return client.post("/v1/chat/completions", json=body).json()

        assert [choice["message"]["content"] for choice in asked([FIRST], n=2)["choices"]] == answers
        num_idle = settle(engine)
        assert len(added) == 2 and num_idle > len(engine.encode(ANSWER, add_bos=False))
        for answer in answers:
            say(engine, runner, "Stockholm.")
            usage = asked([FIRST, {"role": "assistant", "content": answer}, SECOND])["usage"]
            num_new = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            assert num_new < 15, "the question, and no more"


def test_a_thought_that_stays_needs_no_work_for_a_client_that_returns_it(engine_of: Any) -> None:
    engine, runner = engine_of(HYBRID)
    params = SamplingParams(temperature=0.0, max_tokens=200)
    say(engine, runner, f"<think>\n{THOUGHT.strip()}\n</think>\n\n{ANSWER}")
    first = engine.chat([FIRST], params)
    settle(engine)
    history = [FIRST, {"role": "assistant", "content": first.text, "reasoning_content": first.thought}, SECOND]
    second = engine.chat(history, params)
    assert second.usage.prompt_tokens - second.usage.cached_tokens < 20, "the question, and no more"


@pytest.mark.parametrize("said", [{"cache_match": "off"}, {"template_kwargs": {"enable_thinking": False}}])
def test_nothing_is_done_for_who_wants_nothing_kept_or_said_what_will_be_found(engine_of: Any, said: Any) -> None:
    engine, runner = engine_of(PLAIN)
    say(engine, runner, ANSWER)
    engine.chat([FIRST], SamplingParams(temperature=0.0, max_tokens=200), **said)
    assert settle(engine) == 0


def test_a_conversation_that_was_cleared_is_not_remembered_by_what_was_expected(engine_of: Any) -> None:
    """What is made beside the engine's thread may come to its end after the text was forgotten."""
    engine, runner = engine_of(HYBRID)
    say(engine, runner, ANSWER)
    engine.chat([FIRST], SamplingParams(temperature=0.0, max_tokens=200))
    settle(engine)
    engine.clear_cache()
    history = [{"role": "user", "content": ANSWER * 4}]
    FollowUpTurns(engine.prompts).next_ids(history, (), None, ANSWER, seam_of=b"")
    assert engine.prompts.chat([*history, {"role": "assistant", "content": ANSWER}, SECOND], seam_of=b"").num_known == 0


def test_a_reply_that_calls_a_tool_is_not_gone_on_from_by_the_user(engine_of: Any) -> None:
    from radixlm.runtime.chat.tools.tool_format import Tool

    engine, _ = engine_of(HYBRID)
    tool = Tool("now", {"type": "object", "properties": {}})
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert FollowUpTurns(engine.prompts).next_ids([FIRST], [tool], None, call) == ()
    ids = FollowUpTurns(engine.prompts).next_ids([FIRST], [tool], None, ANSWER)
    assert engine.decode(ids).endswith("<|im_start|>user\n")


def test_a_reply_whose_call_was_cut_stands_in_no_later_prompt(engine_of: Any) -> None:
    """What clients send back of it is read as a whole call, and is another text than was generated."""
    from radixlm.runtime.chat.tools.tool_format import Tool

    engine, _ = engine_of(HYBRID)
    tool = Tool("now", {"type": "object", "properties": {}})
    whole = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'
    assert FollowUpTurns(engine.prompts).renderings(whole, "", [tool])
    assert FollowUpTurns(engine.prompts).renderings(whole[: whole.index("1}")], "", [tool]) == []


def test_a_call_whose_thought_is_dropped_is_gone_on_from_by_its_result(engine_of: Any) -> None:
    from radixlm.runtime.chat.tools.tool_format import Tool

    engine, _ = engine_of(HYBRID)
    tool = Tool("now", {"type": "object", "properties": {}})
    call = '<tool_call>\n{"name": "now", "arguments": {"a":1}}\n</tool_call>'
    ids = FollowUpTurns(engine.prompts).next_ids([FIRST], [tool], None, call, "Hm.")
    assert engine.decode(ids).endswith(f"assistant\n{call}<|im_end|>\n<|im_start|>user\n<tool_response>\n")
    earlier = {"role": "assistant", "content": "Hi.", "reasoning_content": "It is kept."}
    assert FollowUpTurns(engine.prompts).next_ids([FIRST, earlier, FIRST], [tool], None, call, "Hm.") == ()
