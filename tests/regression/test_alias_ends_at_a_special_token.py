"""An alias stood for the beginning of a longer text: the history "123456" was fed as the reply " 12\\n" and "3456".

A reply of " 12\\n" stands as "12" in the prompts of a template that trims. That is so right before a special token, and
nowhere else: not where the text goes on, and not where the prompt ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from .conftest import LoadArtifact
from .scripted_talk import Said, ScriptedTalk

TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = {"role": "user", "content": "How many?"}


@pytest.fixture
def talk(load_artifact: LoadArtifact) -> Iterator[ScriptedTalk]:
    """A talk whose model has answered " 12\\n"."""
    with ScriptedTalk(replace(load_artifact("smollm2"), chat_template=TRIMMING)) as talk:
        assert talk.chat([QUESTION], talk.engine.tokenizer.encode_inside(" 12\n")).completion.text == " 12\n"
        yield talk


def history(content: str) -> list[dict[str, str]]:
    return [QUESTION, {"role": "assistant", "content": content}, QUESTION]


def fed(talk: ScriptedTalk, said: Said) -> str:
    return talk.engine.tokenizer.decode(said.completion.prompt_token_ids, skip_special=False)


def test_a_longer_text_is_fed_as_it_is(talk: ScriptedTalk) -> None:
    messages = history("123456, I counted them.")
    said = talk.chat(messages, talk.engine.tokenizer.encode_inside("Yes"))
    assert fed(talk, said) == talk.engine.render(messages)
    assert said.weakest_kind == "exact"


@pytest.mark.parametrize("more", ["12", "12\n", "12 and"])
def test_a_completion_that_goes_on_or_ends_is_fed_as_it_is(talk: ScriptedTalk, more: str) -> None:
    text = talk.engine.render([QUESTION]) + more
    assert fed(talk, talk.complete(text, talk.engine.tokenizer.encode_inside("Yes"))) == text


def test_white_space_that_the_template_does_not_write_is_fed_as_it_is(talk: ScriptedTalk) -> None:
    text = talk.engine.render([QUESTION]) + "12\n\n<|im_end|>\n"
    assert fed(talk, talk.complete(text, talk.engine.tokenizer.encode_inside("Yes"))) == text


def test_the_reply_itself_is_an_alias_still(talk: ScriptedTalk) -> None:
    said = talk.chat(history("12"), talk.engine.tokenizer.encode_inside("Yes"))
    assert said.weakest_kind == "alias" and "assistant\n 12\n<|im_end|>" in fed(talk, said)
