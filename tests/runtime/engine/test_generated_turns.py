"""A conversation goes on from the ids of its earlier turns where its template would write them so, and only there."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.chat.tools.tool_format import Tool
from radixlm.runtime.engine.generated_turns import GeneratedTurns
from radixlm.runtime.engine.prompts import Prompts

from ..fake_artifact import fake_artifact
from ..server.scripted import END_OF_TURN, TOKENIZER, VOCAB_SIZE
from ..thought_templates import HYBRID, OPENED

END = "<|im_end|>"
PLAIN = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
COUNTED = PLAIN.replace("message.role + ", "message.role + (messages | length | string) + ")
"""Writes earlier messages otherwise as soon as there are more."""
TOOLS_LAST = PLAIN.replace("'\\n' + message", "'\\n' + ((tools | tojson) if tools and loop.last else '') + message")
"""As Mistral's: the tools are in the last message."""
TEMPLATES = {"plain": PLAIN, "hybrid": HYBRID, "opened": OPENED, "counted": COUNTED, "tools last": TOOLS_LAST}
THINKS = {"hybrid", "opened"}
TOOL = Tool("now", {"type": "object", "properties": {}})
TEXTS = st.lists(
    st.sampled_from(["a", " b", "é", "\n", "word ", "long text " * 9, END, "<|im_start|>", "</think>"]), max_size=4
).map("".join)


@cache
def prompts_of(name: str) -> Prompts:
    artifact: Any = fake_artifact(
        TOKENIZER, TEMPLATES[name], vocab_size=VOCAB_SIZE, bos_token_id=1, eos_token_id=END_OF_TURN
    )
    return Prompts(artifact, clock=lambda: 0.0)


def spelled_oddly(prompts: Prompts, text: str) -> tuple[int, ...]:
    """The ids of a text as a model may generate it, a letter at a time."""
    return tuple(token_id for letter in text for token_id in prompts.tokenizer.encode_inside(letter))


@settings(deadline=None, max_examples=200)
@given(
    name=st.sampled_from(list(TEMPLATES)),
    said=st.lists(st.tuples(TEXTS, TEXTS), max_size=2),
    asked=TEXTS,
    answer=TEXTS.filter(lambda text: END not in text and "</think>" not in text),
    thought=st.sampled_from(["", "Hm.", "I think so. " * 9]),
    then=st.lists(TEXTS, min_size=1, max_size=2),
    has_tools=st.booleans(),
    ends=st.booleans(),
)
def test_earlier_ids_are_kept_exactly_where_the_whole_conversation_is_written_so(
    name: str,
    said: list[tuple[str, str]],
    asked: str,
    answer: str,
    thought: str,
    then: list[str],
    has_tools: bool,
    ends: bool,
) -> None:
    prompts, tools = prompts_of(name), [TOOL] * has_tools
    thought = thought if name in THINKS else ""
    before = [{"role": "system", "content": "Be brief."}]
    for user, assistant in said:
        before += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    before.append({"role": "user", "content": asked})
    reply = {"role": "assistant", "content": answer} | ({"reasoning_content": thought} if thought else {})
    new = [{"role": "user", "content": text} for text in then]
    fed, whole = prompts.chat(before, tools), prompts.chat([*before, reply, *new], tools)
    opened = "" if name == "opened" else "<think>\n"
    generated = f"{opened}{thought}\n</think>\n\n{answer}" if thought else answer
    earlier = (*fed.ids, *spelled_oddly(prompts, generated))
    turns = GeneratedTurns(len(before) + 1, (*earlier, END_OF_TURN) if ends else earlier)
    found = turns.continued(prompts, [*before, reply, *new], tools, None, context_length=None)
    is_written_so = (whole.text or "").startswith(f"{fed.text}{generated}{END}")
    assert (found is not None) == is_written_so
    if found is not None:
        num_new = len(found.ids) - len(earlier)
        assert found.ids == earlier + whole.ids[-num_new:] and whole.ids[-num_new] == END_OF_TURN
        assert prompts.decode(found.ids) == prompts.decode(whole.ids)
        assert found.num_match == len(found.ids)


def test_nothing_of_a_long_history_is_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, texts = prompts_of("plain"), list[str]()
    messages = [{"role": "user", "content": "once " * 500}, {"role": "assistant", "content": "there was " * 500}]
    earlier = (*prompts.chat(messages[:1]).ids, *spelled_oddly(prompts, "there was " * 500))
    prepare = prompts.tokenizer.prepare_chat
    monkeypatch.setattr(
        prompts.tokenizer, "prepare_chat", lambda text, **more: texts.append(text) or prepare(text, **more)
    )
    new = {"role": "user", "content": "a tree"}
    found = GeneratedTurns(2, earlier).continued(prompts, [*messages, new], (), None, context_length=None)
    assert found is not None and found.ids[: len(earlier)] == earlier
    assert max(map(len, texts)) < 400
