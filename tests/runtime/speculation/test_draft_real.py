"""SmolLM2 guesses for itself, and says the same; what has other tokens is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from radixlm.runtime import Engine, SamplingParams
from radixlm.runtime.chat.grammar import Grammar
from radixlm.runtime.engine.engine_options import EngineOptions
from radixlm.runtime.errors import InvalidParameter

ASKED = [{"role": "user", "content": "Tell a story about a fox that wants to see the sea."}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "legs": {"type": "integer"}}}
CASES = (
    SamplingParams(temperature=0.0, max_tokens=60),
    SamplingParams(temperature=0.8, seed=3, max_tokens=60),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=50, repetition_penalty=1.2, seed=4, max_tokens=60, logprobs=3),
)


def test_a_draft_changes_no_byte_and_its_guesses_are_counted(smollm2_artifact: Path) -> None:
    with (
        Engine(smollm2_artifact, speculate="off", idle_work=False, kv_cache_bytes=1 << 28) as plain,
        Engine(
            smollm2_artifact, speculate="draft", draft=smollm2_artifact, idle_work=False, kv_cache_bytes=1 << 28
        ) as engine,
    ):
        grammar = engine.grammars.compile(Grammar.json_schema({**SCHEMA, "required": ["name", "legs"]}))
        drafted = 0
        for params in CASES:
            for constraint in (None, grammar):
                expected = plain.chat(ASKED, params, constraint=constraint)
                found = engine.chat([ASKED, ASKED[:1]], params, constraint=constraint)
                for reply in found:
                    assert (reply.token_ids, reply.logprobs) == (expected.token_ids, expected.logprobs)
                drafted += sum(reply.usage.drafted_tokens for reply in found)
        engine.check()
        stats = engine.stats().draft
        assert stats is not None and stats.about is not None and stats.about.name == plain.manifest.name
        if drafted:  # as many guesses are made as pay on this machine, which may be none
            assert stats.num_computed_tokens > 0 < stats.num_cached_pages
            assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
        engine.clear_cache()
        cleared = engine.stats().draft
        assert cleared is not None and cleared.num_free_pages == cleared.num_pages
        assert cleared.about is not None and cleared.about.kv_bytes <= (1 << 28) // 4


def test_a_draft_with_other_tokens_is_refused(smollm2_artifact: Path, tiny_artifact: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"has other tokens \(digest \w{12}\) than .*; choose a draft") as error:
        Engine(smollm2_artifact, draft=tiny_artifact, kv_cache_bytes=1 << 28)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"speculate": "draft"}, "there is no draft"),
        ({"speculate": "off", "draft": "a"}, "leave one of them out"),
        ({"speculate": "lookup", "draft": "a"}, "leave one of them out"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidParameter, match=says):
        EngineOptions(**options)  # type: ignore[arg-type]
