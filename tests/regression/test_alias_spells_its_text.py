"""A reply whose ids are more than its text, white space apart, has no alias: its KV would be reused for another text.

Clients never see special tokens, and U+FFFD for bytes that are no character; trimming templates made aliases of both.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from .conftest import LoadArtifact
from .scripted_talk import ScriptedTalk

TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = {"role": "user", "content": "Well?"}
IM_START, BYTE_C3 = 1, 142  # of SmolLM2


@pytest.mark.parametrize(
    ("between", "kind"), [((), "alias"), ((IM_START,), "exact"), ((BYTE_C3,), "exact")], ids=["text", "special", "byte"]
)
def test_alias_spells_its_text(load_artifact: LoadArtifact, between: tuple[int, ...], kind: str) -> None:
    with ScriptedTalk(replace(load_artifact("smollm2"), chat_template=TRIMMING)) as talk:
        encode = talk.engine.tokenizer.encode_inside
        first = talk.chat([QUESTION], [*encode(" Hello there"), *between, *encode(" and more")])
        answer = {"role": "assistant", "content": first.completion.text}
        second = talk.chat([QUESTION, answer, QUESTION], encode("Yes"))
        reused = len(first.held) if kind == "alias" else len(first.completion.prompt_token_ids)
        assert (second.num_reused, second.weakest_kind) == (reused, kind)
        if between:
            rendered = talk.engine.render([QUESTION, answer, QUESTION])
            assert [*second.completion.prompt_token_ids] == talk.engine.tokenizer.encode(rendered, parse_special=True)
