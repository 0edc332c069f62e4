"""mlc-llm #2897: Llama-2's prompts end in 29871 ('▁'), gone from the next turn's: replies were prefilled again.
Ours reuses prompt and reply whole, the suffix kept or stripped, whether the reply begins with '▁X' or with 'X'. Chats
and raw completions lose it, and token ids where the request says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from radixlm.runtime.cache.why_not_more import MatchPolicy
from radixlm.tokenizer_fix import Tokenizer

from .conftest import LoadArtifact
from .scripted_talk import ScriptedTalk

FIRST = {"role": "user", "content": "The capital of France"}
SECOND = {"role": "user", "content": "And of Italy"}


@dataclass(frozen=True)
class Case:
    """A row of the table: how the first prompt ends, how the reply begins, what the next turn's prompt reuses of it.

    With `exact` the reply is reused where its ids happen to be the encoding of prompt and reply together; with
    `text` it is in every case, found by `kind`.
    """

    suffix: str
    begins: str
    exact_reuses_reply: bool
    kind: str


CASES = [
    Case("kept", "▁The", exact_reuses_reply=True, kind="exact"),
    Case("kept", "The", exact_reuses_reply=False, kind="text"),
    Case("stripped", "▁The", exact_reuses_reply=True, kind="exact"),
    Case("stripped", "The", exact_reuses_reply=False, kind="alias"),
]


@pytest.mark.parametrize("name", ["tiny_spm", "llama2-legacy"])
@pytest.mark.parametrize("match", ["text", "exact"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.suffix}-{case.begins}")
def test_llama2_suffix(load_artifact: LoadArtifact, name: str, match: str, case: Case) -> None:
    with ScriptedTalk(load_artifact(name), "text" if match == "text" else "exact") as talk:
        tokenizer = talk.engine.tokenizer
        suffix = piece(tokenizer, "▁")
        reply = [piece(tokenizer, case.begins), piece(tokenizer, "▁capital"), piece(tokenizer, "▁is")]
        if case.suffix == "kept":
            prompt = talk.engine.render([FIRST])
            first = talk.complete(prompt, reply, strip_suffix=False)
            follow_up = prompt + first.completion.text + " </s>" + talk.engine.render([SECOND])
            second = talk.complete(follow_up, reply, strip_suffix=False)
        else:
            first = talk.chat([FIRST], reply)
            history = [FIRST, {"role": "assistant", "content": first.completion.text}, SECOND]
            second = talk.chat(history, reply)

        ids = first.completion.prompt_token_ids
        assert (ids[-1] == suffix) == (case.suffix == "kept")
        assert first.num_prefilled == len(ids)
        if match == "text" or case.exact_reuses_reply:
            assert second.num_reused == len(first.held) == len(ids) + len(reply)
        else:  # up to the suffix: what every engine that looks up ids alone does in every turn
            assert second.num_reused == len(ids) - (case.suffix == "kept")
        assert second.weakest_kind == (case.kind if match == "text" else "exact")


@pytest.mark.parametrize("name", ["tiny_spm", "llama2-legacy"])
@pytest.mark.parametrize(
    ("match", "begins", "reuses_reply"),
    [("text", "▁The", True), ("text", "The", True), ("exact", "▁The", True), ("exact", "The", False)],
)
def test_a_completion_loses_the_appended_token(
    load_artifact: LoadArtifact, name: str, match: MatchPolicy, begins: str, reuses_reply: bool
) -> None:
    with ScriptedTalk(load_artifact(name), match) as talk:
        tokenizer = talk.engine.tokenizer
        prompt = talk.engine.render([FIRST])
        reply = [piece(tokenizer, begins), piece(tokenizer, "▁capital"), piece(tokenizer, "▁is")]
        first = talk.complete(prompt, reply)
        second = talk.complete(prompt + first.completion.text + " </s>" + talk.engine.render([SECOND]), reply)

        prompt_ids = first.completion.prompt_token_ids
        assert [*prompt_ids, piece(tokenizer, "▁")] == talk.engine.encode(prompt)
        assert first.completion.text == "The capital is"  # the space is in the prompt that the client has
        assert second.num_reused == (len(first.held) if reuses_reply else len(prompt_ids))


@pytest.mark.parametrize("name", ["tiny_spm", "llama2-legacy"])
@pytest.mark.parametrize("match", ["text", "exact"])
def test_token_ids_lose_the_appended_token_where_the_request_says_so(
    load_artifact: LoadArtifact, name: str, match: MatchPolicy
) -> None:
    with ScriptedTalk(load_artifact(name), match) as talk:
        suffix = piece(talk.engine.tokenizer, "▁")
        one, three = range(300, 315), range(330, 338)
        two = [piece(talk.engine.tokenizer, "▁The"), *range(320, 326)]

        reused = {}
        for namespace, strip_suffix in ((b"stripped", True), (b"kept", None)):
            first = talk.complete([*one, suffix], two, strip_suffix=strip_suffix, namespace=namespace)
            second = talk.complete([*one, *two, *three, suffix], two, strip_suffix=strip_suffix, namespace=namespace)
            assert (first.completion.prompt_token_ids[-1] == suffix) == (strip_suffix is None)
            reused[strip_suffix] = second.num_reused
        assert reused == {True: 22, None: 15}  # of 31


def piece(tokenizer: Tokenizer, text: str) -> int:
    """The id of a piece as the vocabulary writes it; the tokens of single bytes come before all pieces."""
    spelled = text.replace("▁", " ").encode()
    return max(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == spelled)
