"""mlc-llm #2897: Llama-2's prompts end in 29871 ('▁'), gone from the next turn's: replies were prefilled again.
Ours reuses prompt and reply whole, the suffix kept or stripped, whether the reply begins with '▁X' or with 'X'.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
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
        if case.suffix == "kept":  # a completion is fed as the client wrote it
            prompt = talk.engine.render([FIRST])
            first = talk.complete(prompt, reply)
            second = talk.complete(prompt + first.completion.text + " </s>" + talk.engine.render([SECOND]), reply)
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


def piece(tokenizer: Tokenizer, text: str) -> int:
    """The id of a piece as the vocabulary writes it; the tokens of single bytes come before all pieces."""
    spelled = text.replace("▁", " ").encode()
    return max(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == spelled)
