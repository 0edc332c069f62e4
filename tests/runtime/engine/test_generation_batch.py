"""Several prompts in one call: computed together, in order, and ended together where one fails."""

from __future__ import annotations

import gzip
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import EmptyPrompt, EngineOverloaded, InvalidParameter, InvalidRequest
from radixlm.runtime.model.batch import Batch

from ..fake_artifact import FakeArtifact, fake_artifact
from ..fake_model import FakeModel
from ..server.real_server import WAIT_S, wait_until
from .test_engine import END_OF_TURN, TEMPLATE, TOKENIZER, VOCAB_SIZE

PARAMS = SamplingParams(seed=1, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(seed=1, ignore_eos=True)
AGAIN_S = 5.0
PROMPTS = ["A radix tree is", "Once", "The capital of France is", "Once upon a time"]


@pytest.fixture(scope="module")
def artifact() -> FakeArtifact:
    tokenizer_json = gzip.decompress(Path(TOKENIZER).read_bytes()).decode()
    return fake_artifact(tokenizer_json, TEMPLATE, vocab_size=VOCAB_SIZE, bos_token_id=1, eos_token_id=END_OF_TURN)


class Opened:
    """An engine whose model computes while `go_on` is set, and nothing before `num_expected` requests are there."""

    def __init__(self, artifact: Any, **options: Any) -> None:
        self.num_expected = 0
        self.widths: list[int] = []  # requests of each step
        self.go_on = threading.Event()
        self.go_on.set()
        self.engine = Engine(artifact, open_runner=self._open, **{"max_num_seqs": 8, **options})

    def _open(self, _: object, num_pages: int, __: object) -> FakeModel:
        self.model = FakeModel(num_pages, VOCAB_SIZE)
        self.model.before = self.hold
        return self.model

    def hold(self, batch: Batch) -> None:
        self.widths.append(batch.arrays.page_table.shape[0])
        if self.num_expected:
            wait_until(lambda: self.engine.stats().num_running + self.engine.stats().num_waiting == self.num_expected)
            self.num_expected = 0
        assert self.go_on.wait(WAIT_S)

    def require_idle(self) -> None:
        """Nothing is left of any request: the thread is asked after all that it was told."""
        self.go_on.set()
        self.engine.check()
        stats = self.engine.stats()
        assert stats.num_running == stats.num_waiting == stats.num_used_pages == 0


@pytest.fixture
def opened(artifact: FakeArtifact) -> Iterator[Opened]:
    opened = Opened(artifact)
    yield opened
    opened.engine.close()


def test_a_prompt_among_several_that_is_none_is_refused_by_its_value(artifact: FakeArtifact) -> None:
    opened = Opened(artifact)
    with opened.engine as engine, pytest.raises(InvalidParameter, match=r"^prompt 1: prompt is 5; it must be text"):
        engine.generate(["Once", 5], PARAMS)  # type: ignore[list-item]


def test_texts_give_what_each_gives_alone_in_their_order(opened: Opened) -> None:
    alone = [opened.engine.generate(prompt, PARAMS).token_ids for prompt in PROMPTS]
    together = opened.engine.generate(PROMPTS, PARAMS)
    assert [completion.token_ids for completion in together] == alone
    assert opened.engine.generate(tuple(PROMPTS), PARAMS)[1].token_ids == alone[1]


def test_lists_of_ids_are_several_prompts_and_a_list_of_ids_is_one(opened: Opened) -> None:
    ids = [opened.engine.encode(prompt) for prompt in PROMPTS]
    together = opened.engine.generate(ids, PARAMS)
    assert [completion.prompt_token_ids for completion in together] == [tuple(each) for each in ids]
    one = opened.engine.generate(ids[0], PARAMS)
    assert one.token_ids == together[0].token_ids


def test_conversations_give_what_each_gives_alone(opened: Opened) -> None:
    talks = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    alone = [opened.engine.chat(talk, PARAMS).token_ids for talk in talks]
    assert [completion.token_ids for completion in opened.engine.chat(talks, PARAMS)] == alone


def test_they_are_computed_together(opened: Opened) -> None:
    opened.num_expected = len(PROMPTS)
    opened.engine.generate(PROMPTS, PARAMS)
    assert max(opened.widths) == len(PROMPTS)


def test_an_empty_list_is_an_empty_prompt(opened: Opened) -> None:
    with pytest.raises(EmptyPrompt):
        opened.engine.generate([])
    with pytest.raises(EmptyPrompt):
        opened.engine.chat([])


def test_a_list_that_begins_with_an_id_is_one_prompt_of_ids(opened: Opened) -> None:
    mixed: Any = [5, "Once"]
    with pytest.raises(InvalidRequest):
        opened.engine.generate(mixed, PARAMS)


def test_one_that_is_refused_ends_those_before_it(opened: Opened) -> None:
    opened.go_on.clear()
    with pytest.raises(InvalidRequest, match="vocabulary"):
        opened.engine.generate([[1, 2], [1, VOCAB_SIZE]], ENDLESS)
    opened.require_idle()
    assert opened.engine.stats().finished_by_reason == {"cancelled": 1}


def test_one_that_fails_ends_the_others_at_once(opened: Opened) -> None:
    """The last of them fails, and the first would go on for long."""

    def spoil(batch: Batch, logits: Any) -> None:
        if batch.arrays.page_table.shape[0] == 3:
            logits[-1] = float("nan")
            opened.go_on.clear()

    opened.model.after = spoil
    opened.num_expected = 3
    with pytest.raises(Exception, match="not finite"):
        opened.engine.generate([[1, 2], [3, 4], [5, 6]], ENDLESS)
    opened.require_idle()
    assert opened.engine.stats().finished_by_reason["cancelled"] == 2


def test_more_than_the_queue_takes_are_refused_and_none_goes_on(artifact: FakeArtifact) -> None:
    opened = Opened(artifact, max_num_seqs=1, max_queue=1)
    opened.go_on.clear()
    with pytest.raises(EngineOverloaded):
        opened.engine.generate(PROMPTS, ENDLESS)
    opened.require_idle()
    opened.engine.close()


def test_an_interrupt_ends_all_of_them(opened: Opened) -> None:
    main, is_raised = threading.main_thread().ident, threading.Event()
    assert main is not None

    def interrupt(batch: Batch) -> None:
        if batch.arrays.page_table.shape[0] == 2:
            opened.go_on.clear()
            signal.pthread_kill(main, signal.SIGINT)
            while not is_raised.wait(AGAIN_S):  # one that lands in a callback of the garbage collector is lost
                signal.pthread_kill(main, signal.SIGINT)
        opened.hold(batch)

    opened.model.before = interrupt
    opened.num_expected = 2
    with pytest.raises(KeyboardInterrupt):
        try:
            opened.engine.generate(PROMPTS[:2], ENDLESS)
        finally:
            is_raised.set()
    opened.model.before = opened.hold
    opened.require_idle()
    assert opened.engine.stats().finished_by_reason == {"cancelled": 2}


def test_the_callers_name_is_on_the_stream_and_the_completion(opened: Opened) -> None:
    named = opened.engine.stream("Once", PARAMS, request_id="job 7")
    again = opened.engine.stream("Once", PARAMS, request_id="job 7")  # as often as the caller likes
    unnamed = opened.engine.stream_chat([{"role": "user", "content": "Once"}], PARAMS)
    assert named.request_id == again.request_id == named.result().request_id == again.result().request_id == "job 7"
    assert unnamed.result().request_id == unnamed.request_id != "job 7"
    assert [each.request_id for each in opened.engine.generate(PROMPTS, PARAMS, request_id="all")] == ["all"] * 4
    assert opened.engine.chat([{"role": "user", "content": "Once"}], PARAMS, request_id="me").request_id == "me"


@pytest.mark.parametrize("name", ["", "x" * 257, 7])
def test_a_name_that_is_none_is_refused(opened: Opened, name: Any) -> None:
    with pytest.raises(InvalidParameter) as refused:
        opened.engine.stream("Once", PARAMS, request_id=name)
    assert refused.value.param == "request_id"


def test_a_named_stream_can_be_cancelled(opened: Opened) -> None:
    stream = opened.engine.stream("Once", ENDLESS, request_id="job 7")
    stream.cancel()
    assert stream.result().finish_reason == "cancelled"
