"""Replayed conversations prefill what is new and no more, whatever ids the model spoke in, whatever clients change."""

from __future__ import annotations

import dataclasses
import functools
import gzip
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.model.batch import PageCopy
from radixlm.runtime.model.scripted_runner import ScriptedRunner

from bench.data import Conversation, oasst
from bench.replay.engine import ReplayEngine
from bench.replay.models import MODELS, TalkingArtifact, artifact, read_tokenizer
from bench.replay.recording_runner import RecordingRunner
from bench.replay.replies import KINDS, Replies
from bench.replay.talks import Replay

from .adversaries import Adversaries
from .ledger import Ledger

TOKENIZERS = Path(__file__).resolve().parents[2] / "data" / "tokenizers"
ALWAYS = {
    "smollm2": "smollm2.json.gz",
    "qwen2": "qwen2.json.gz",
    "llama2": "tiny_spm.json",
    "llama2-spaced": "tiny_spm.json",
}
TALKS = (
    Conversation(
        (
            "What is a radix tree, and who uses one?",
            "A radix tree stores strings: each edge has one or more letters.\n\nRouters use one for addresses.",
            "Whom does naïve Ünïcode hurt? 你好",
            "Whoever cuts it: é is two bytes, 好 is three.",
            "Thanks. What else is there?",
        )
    ),
    Conversation(("Tell me of the tree", "the tree is one in the wood and it is there", "And then?", "then the end")),
)


@functools.cache
def model(name: str) -> TalkingArtifact:
    """With a tokenizer that the repository carries: for Llama-2 a small one of its kind."""
    data = (TOKENIZERS / ALWAYS[name]).read_bytes()
    return artifact(MODELS[name], (gzip.decompress(data) if ALWAYS[name].endswith(".gz") else data).decode())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["smollm2", "llama2", "llama2-spaced"])
def test_text_prefills_what_is_new_and_no_more(name: str, kind: str) -> None:
    replayed = Replay(name, model(name)).run(TALKS, kind, "text")
    assert replayed.num_turns == 3
    assert replayed.num_prefilled <= replayed.num_ideal + (kind == "cut")  # whose last token may be two of the prompt's


def test_replies_in_other_ids_are_prefilled_again_by_those_who_match_ids() -> None:
    replay = Replay("smollm2", model("smollm2"))
    seam, exact, others = (replay.run(TALKS, "split", policy) for policy in ("seam", "exact", "others"))
    assert seam.num_prefilled == exact.num_prefilled <= others.num_prefilled
    assert exact.ratio > 1.5
    suffixed = Replay("llama2-spaced", model("llama2-spaced"))
    assert suffixed.run(TALKS, "space", "exact").ratio == 1.0 < 2.0 < suffixed.run(TALKS, "space", "others").ratio


@pytest.mark.parametrize("name", ["smollm2", "llama2"])
def test_reuse_among_clients_that_change_histories_is_true_and_as_long_as_it_may_be(name: str) -> None:
    with ReplayEngine(model(name)) as engine:
        held = Adversaries(engine).run(TALKS)
    assert held.num_requests.total() > 30 and not held.num_short.total()


@pytest.mark.parametrize("name", MODELS)
def test_real_tokenizers_do_as_well_on_oasst(name: str, data_dir: Path) -> None:
    real = artifact(MODELS[name], read_tokenizer(MODELS[name], data_dir))
    conversations = oasst(data_dir, 6)
    replayed = Replay(name, real).run(conversations, "split", "text")
    assert replayed.num_prefilled == replayed.num_ideal
    with ReplayEngine(real) as engine:
        assert not Adversaries(engine).run(conversations[:2]).num_short.total()


def test_split_replies_spell_their_text_in_other_ids() -> None:
    with ReplayEngine(model("qwen2")) as engine:
        tokenizer = engine.engine.tokenizer
        replies = Replies(tokenizer)
        text = TALKS[0].texts[1]
        drawn = {tuple(replies.split(text)) for _ in range(5)}
        assert len(drawn) == 5 and tuple(replies.usual(text)) not in drawn
        assert {tokenizer.decode(ids) for ids in drawn} == {text}


def test_the_door_notices_kv_of_other_tokens() -> None:
    with ReplayEngine(model("smollm2")) as engine:
        messages = [{"role": "user", "content": "Hello there, how are you today?"}]
        engine.ask(messages, [engine.end_id])
        engine.recorder.histories[:] = [0] * len(engine.recorder.histories)
        with pytest.raises(Exception, match="computed behind other tokens"):
            engine.ask(messages, [engine.end_id])
    recorder = RecordingRunner(2, ScriptedRunner(8))
    recorder.ids[:] = np.arange(32)
    recorder.copy_rows([PageCopy(0, 1, 3)])
    assert recorder.ids[16:20].tolist() == [0, 1, 2, 19]


def test_the_ledger_notices_lies_and_laziness() -> None:
    with ReplayEngine(model("smollm2")) as engine:
        messages = [{"role": "user", "content": "Hello there, how are you today?"}]
        ledger, prompt = Ledger(), engine.spelled(messages)
        turn = engine.ask(messages, [engine.end_id])
        ledger.check_truth(prompt, turn)
        assert ledger.num_allowed(prompt) == 0
        ledger.note(prompt, turn)
        assert ledger.num_allowed(prompt) == len(prompt.text)
        assert ledger.num_reused(prompt, turn) == 0
        with pytest.raises(AssertionError, match="spell another text"):
            ledger.check_truth(prompt, dataclasses.replace(turn, prompt_ids=turn.prompt_ids[:-1]))
        with pytest.raises(AssertionError, match="nobody computed"):
            ledger.check_truth(prompt, dataclasses.replace(turn, reused_ids=turn.prompt_ids[1:]))
