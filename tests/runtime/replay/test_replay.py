"""Recorded requests are computed again to the same bits, whatever they ask; what differs is named with its token."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from radixlm.runtime.chat.grammar import Grammar
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import RecordingUnusable
from radixlm.runtime.replay.recorder import Recorder
from radixlm.runtime.replay.recording import RecordedRequest, lines_of, params_of
from radixlm.runtime.replay.replay import Replayed, replay

from ..server.real_server import real_engine

PLAIN = SamplingParams(max_tokens=6, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "once there was"}]
Asked = Callable[[Engine], object]


def record(path: Path, *asks: Asked, max_bytes: int | None = None, **options: Any) -> list[object]:
    """Have an engine that records answer; return the answers."""
    recorder = Recorder(path, max_bytes)
    engine, _ = real_engine(recorder=recorder, **options)
    with engine:
        recorder.begin(engine, "fake")
        answers = [ask(engine) for ask in asks]
    recorder.close()
    return answers


def replayed(path: Path, **options: Any) -> Replayed:
    """Compute a recording on another engine."""
    engine, _ = real_engine(**options)
    with engine:
        found = replay(path, engine)
        engine.check()
    return found


def requests(path: Path) -> list[RecordedRequest]:
    return [line for line in lines_of(path) if isinstance(line, RecordedRequest)]


TOKEN_IDS = st.integers(3, 411)  # of the tokenizer
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(0, 12),
    temperature=st.sampled_from([0.0, 0.5, 1.3]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.none() | st.integers(-5, 2**63),
    logprobs=st.none() | st.integers(0, 3),
    logit_bias=st.dictionaries(TOKEN_IDS, st.floats(-5, 5), max_size=3),
    stop=st.sampled_from([(), ("a",), ("th", "e")]),
    banned_strings=st.sampled_from([(), ("an", "t")]),
    ignore_eos=st.booleans(),
)
PROMPTS = st.lists(TOKEN_IDS, min_size=1, max_size=40) | st.sampled_from(["once there was", "the end "])


@pytest.fixture(scope="module")
def other() -> Iterator[Engine]:
    """An engine that records nothing."""
    engine, _ = real_engine()
    with engine:
        yield engine


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(PROMPTS | st.just(MESSAGES), PARAMS), min_size=1, max_size=6))
def test_any_requests_are_computed_again_to_the_same_bits(
    tmp_path: Path, other: Engine, asked: list[tuple[Any, SamplingParams]]
) -> None:
    path = tmp_path / "requests.jsonl"
    path.unlink(missing_ok=True)

    def answered(prompt: Any, params: SamplingParams) -> Asked:
        return lambda engine: (engine.chat if prompt == MESSAGES else engine.generate)(prompt, params)

    answers: list[Any] = record(path, *(answered(*each) for each in asked))
    for (prompt, params), answer in zip(asked, answers, strict=True):
        assert (answer.logprobs is None) == (params.logprobs is None), "a client gets only what it asked for"
        if params.greedy or params.seed is not None:
            plain: Any = answered(prompt, params)(other)
            assert (answer.token_ids, answer.logprobs) == (plain.token_ids, plain.logprobs)
    found = replay(path, other)
    assert not found.differences and not found.not_compared
    assert found.num_equal == len(asked)
    assert found.num_tokens == sum(len(answer.token_ids) for answer in answers)


def test_a_conversation_whose_history_was_found_by_text_is_replayed_by_the_ids_that_were_fed(tmp_path: Path) -> None:
    def talk(engine: Engine) -> None:
        history = list(MESSAGES)
        for turn in range(3):
            reply = engine.chat(history, SamplingParams(max_tokens=9, ignore_eos=True, seed=turn))
            history += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "and then"}]

    record(tmp_path / "talk.jsonl", talk)
    found = replayed(tmp_path / "talk.jsonl")
    assert (found.num_equal, found.differences) == (3, [])


def test_a_grammar_is_kept_to_again(tmp_path: Path) -> None:
    grammar = Grammar.choice(["once", "the end"])
    params = SamplingParams(max_tokens=20)
    [answer] = record(
        tmp_path / "r.jsonl",
        lambda engine: engine.generate("a", params, constraint=engine.grammars.compile(grammar)),
    )
    assert answer.text in ("once", "the end")  # type: ignore[attr-defined]
    assert requests(tmp_path / "r.jsonl")[0].grammar == grammar
    assert replayed(tmp_path / "r.jsonl").num_equal == 1


def test_of_a_constraint_that_only_the_caller_knows_nothing_is_claimed(tmp_path: Path) -> None:
    class Anything:
        def start(self) -> Any:
            return self

        is_finished = False

        def mask(self) -> None:
            return None

        def accept(self, token_id: int) -> None: ...

    record(tmp_path / "r.jsonl", lambda engine: engine.generate("a", PLAIN, constraint=Anything()))
    found = replayed(tmp_path / "r.jsonl")
    assert found.not_compared == {"constraint": 1} and not found.num_equal


def test_a_cancelled_request_is_not_compared(tmp_path: Path) -> None:
    def leave(engine: Engine) -> None:
        stream = engine.stream("once", SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        stream.cancel()
        assert stream.result().finish_reason == "cancelled"

    record(tmp_path / "r.jsonl", leave)
    assert replayed(tmp_path / "r.jsonl").not_compared == {"cancelled": 1}


def test_what_is_to_be_kept_nowhere_is_not_recorded(tmp_path: Path) -> None:
    ask = lambda engine: engine.generate("a secret", PLAIN, cache_match="off")  # noqa: E731
    [answer] = record(tmp_path / "r.jsonl", ask)
    assert answer.logprobs is None and requests(tmp_path / "r.jsonl") == []  # type: ignore[attr-defined]


def test_a_reply_that_the_context_ended_is_replayed_with_a_longer_context(tmp_path: Path) -> None:
    record(
        tmp_path / "r.jsonl", lambda engine: engine.generate("a", SamplingParams(ignore_eos=True)), context_length=40
    )
    found = replayed(tmp_path / "r.jsonl", context_length=128)
    assert (found.num_equal, found.differences) == (1, [])


def test_the_first_token_that_differs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record(path, *(lambda engine, n=n: engine.generate([n], PLAIN, request_id=f"r{n}") for n in (5, 6, 7)))
    first, *lines = [json.loads(line) for line in path.read_text().splitlines()]

    def changed(**fields: Any) -> Replayed:
        edited = [lines[0], lines[1] | fields, lines[2]]
        path.write_text("".join(json.dumps(line) + "\n" for line in (first, *edited)))
        return replayed(path)

    ids, digests = lines[1]["reply_ids"], lines[1]["logprobs"]
    other = (ids[3] + 1) % 400
    for fields, place, says in (
        ({"reply_ids": [*ids[:3], other, *ids[4:]]}, 3, f"is {ids[3]}, and was {other}"),
        ({"logprobs": [*digests[:2], "0" * 16, *digests[3:]]}, 2, f"is {ids[2]} again, and its logprobs have other"),
        ({"reply_ids": ids[:4], "logprobs": digests[:4]}, 4, "is where one reply ends: of 6 tokens, and of 4 before"),
        ({"finish_reason": "stop"}, 6, "would follow: the reply ended by length, and by stop"),
        ({"prompt": {"ids": [100000]}}, None, "100000"),
        ({"params": {"no_such": 1}}, None, "no sampling parameter no_such"),
        ({"params": {"seed": "x"}}, None, "cannot be read"),
    ):
        found = changed(**fields)
        [difference] = found.differences
        assert (difference.request, difference.number, difference.place) == ("r6", 2, place)
        assert says in difference.says and found.num_equal == 2
    assert not changed().differences


def test_another_model_gives_other_logprobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "r.jsonl", lambda engine: engine.generate([5], PLAIN))
    from ..server.real_server import SlowModel

    forward = SlowModel.forward

    def nudged(self: SlowModel, batch: Any) -> Any:
        logits = forward(self, batch)
        return np.nextafter(logits, np.float32(np.inf), dtype=np.float32)  # one unit in the last place

    monkeypatch.setattr(SlowModel, "forward", nudged)
    [difference] = replayed(tmp_path / "r.jsonl").differences
    assert difference.place == 0 and "logprobs have other bits" in difference.says


def test_only_the_owner_may_read_the_files_and_a_full_one_is_replayed_with_those_before_it(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.touch(0o644)
    record(path, *[lambda engine: engine.generate([5, 6], PLAIN)] * 9, max_bytes=1500)
    files = sorted(tmp_path.iterdir())
    assert 1 < len(files) <= 5
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert json.loads(file.read_text().splitlines()[0])["event"] == "begin"
    assert replayed(path).num_equal == len(requests(path)) > 2


def test_a_line_that_was_cut_is_left_out_and_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record(path, lambda engine: engine.generate([5], PLAIN), lambda engine: engine.generate([6], PLAIN))
    path.write_bytes(path.read_bytes()[:-30])
    assert replayed(path).num_equal == 1
    record(path, lambda engine: engine.generate([7], PLAIN))
    assert replayed(path).num_equal == 2  # another process went on after it
    lines = path.read_text().splitlines(keepends=True)
    for broken, says in (
        ([*lines[:2], "{}\n", *lines[4:]], "line 3 is no line"),
        ([*lines[:2], "{}\n"], "line 3 is no line"),
        ([*lines[:2], "{}\n", "{"], "line 3 is no line"),
        (['{"event": "request"}\n'], "line 1 is no line"),
        (lines[1:2], "does not begin"),
    ):
        path.write_text("".join(broken))
        with pytest.raises(RecordingUnusable, match=says):
            requests(path)


def test_a_recording_that_cannot_be_written_ends_and_the_engine_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder("/dev/full")
    engine, _ = real_engine(recorder=recorder)
    with engine:
        recorder.begin(engine, "fake")
        for _ in range(2):
            assert len(engine.generate([5], PLAIN).token_ids) == 6
    assert caplog.text.count("the recording ends here") == 1


@given(PARAMS)
def test_parameters_outlive_json(params: SamplingParams) -> None:
    line = RecordedRequest(
        id="r",
        prompt={"ids": []},  # type: ignore[arg-type]
        params=json.loads(json.dumps(params_of(params))),
        reply_ids=(),
        logprobs=(),
        finish_reason="stop",
    )
    assert line.sampling() == params
