"""mlc-llm #3179 (open): Llama-3 said Han|zi, its own text is encoded H|anzi, and all from there on was prefilled again.
Ours keeps the ids that the model made where they spell the prompt: a later turn computes what is new and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .conftest import LoadArtifact
from .scripted_talk import Said, ScriptedTalk

VECTORS = Path(__file__).resolve().parent.parent / "data" / "vectors"
HANZI = (74225, 8510)  # 'Han', 'zi'


def test_retokenization_of_han_zi(load_artifact: LoadArtifact) -> None:
    artifact = load_artifact("llama3")
    question = "How are Chinese characters called?"
    with ScriptedTalk(artifact) as talk:
        assert tuple(talk.engine.tokenizer.encode("Hanzi", add_bos=False)) == (39, 72918)
        first, second = two_turns(talk, question, HANZI)
        assert first.completion.text == "Hanzi"
        assert second.completion.prompt_token_ids[: len(first.held)] == first.held
        assert (second.num_reused, second.weakest_kind) == (len(first.held), "text")
    with ScriptedTalk(artifact, "exact") as talk:
        first, second = two_turns(talk, question, HANZI)
        assert second.num_reused == len(first.completion.prompt_token_ids)
        why = second.completion.cache_match.why_not_more
        assert why is not None and why.kind == "retokenized"
        assert why.cached_ids == HANZI and why.wanted_ids[:2] == (39, 72918)


def test_retokenization_of_recorded_replies(load_artifact: LoadArtifact) -> None:
    recorded = json.loads((VECTORS / "smollm2_retok.json").read_text(encoding="utf-8"))
    # one was cut within a character: its text is not what it spells, and no later prompt has it
    changed = [one for one in recorded if one["first_diff"] is not None and "\ufffd" not in one["text"]]
    assert len(changed) == 7
    artifact = load_artifact("smollm2")
    lost = 0
    with ScriptedTalk(artifact) as talk, ScriptedTalk(artifact, "exact") as exact_talk:
        for one in changed:
            first, second = two_turns(talk, one["q"], one["generated_ids"])
            assert first.completion.text == one["text"]
            assert second.completion.prompt_token_ids[: len(first.held)] == first.held
            assert (second.num_reused, second.weakest_kind) == (len(first.held), "text")
            first, second = two_turns(exact_talk, one["q"], one["generated_ids"])
            lost += len(first.held) - second.num_reused
    assert lost == sum(len(one["generated_ids"]) - one["first_diff"] for one in changed)


def two_turns(talk: ScriptedTalk, question: str, reply: Sequence[int]) -> tuple[Said, Said]:
    """A reply to a question, and one to what a client sends next: the conversation as text."""
    messages = [{"role": "user", "content": question}]
    first = talk.chat(messages, reply)
    messages += [{"role": "assistant", "content": first.completion.text}, {"role": "user", "content": "And then?"}]
    return first, talk.chat(messages, [5])
