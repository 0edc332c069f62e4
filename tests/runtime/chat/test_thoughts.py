"""How models write thoughts: recognised by their templates, and taken out of replies however these are cut."""

from __future__ import annotations

import random

import pytest
from radixlm.runtime.chat.chat_template import ChatTemplate
from radixlm.runtime.chat.reasoning_format import ReasoningFormat, reasoning_format_of, without_reasoning
from radixlm.runtime.chat.reasoning_splitter import MAX_HEADER, splitter_of
from radixlm.runtime.chat.scan import ReplyPiece

from ..thought_templates import HEADED, HYBRID, OF_CALLS, OPENED, PARTS
from ..tool_templates import LLAMA, NO_TOOLS, QWEN

HYBRID_FORMAT = ReasoningFormat("<think>\n", "\n</think>\n\n", field="reasoning_content")
OPENED_FORMAT = ReasoningFormat("<think>", "</think>", is_loose=True)
HEADED_FORMAT = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|><|im_start|>assistant<|channel|>final<|message|>",
    "<|channel|>final<|message|>",
    "thinking",
)
FORMATS = {
    "hybrid": (HYBRID, HYBRID_FORMAT),
    "opened": (OPENED, OPENED_FORMAT),
    "headed": (HEADED, HEADED_FORMAT),
    "parts": (PARTS, ReasoningFormat("[THINK]", "[/THINK]", field="content")),
    "of calls": (OF_CALLS, ReasoningFormat("<|channel>thought\n", "\n<channel|>", field="reasoning")),
}
HYBRID_PROMPT, OPEN_PROMPT = "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(("template", "format"), FORMATS.values(), ids=FORMATS)
def test_a_format_is_recognised_by_how_the_template_writes_a_thought(template: str, format: ReasoningFormat) -> None:
    assert reasoning_format_of(ChatTemplate(template)) == format


@pytest.mark.parametrize("template", [QWEN, LLAMA, NO_TOOLS, "{{ 1 / 0 }}", "{{ messages | tojson }}"])
def test_a_template_without_thoughts_has_no_format(template: str) -> None:
    assert reasoning_format_of(ChatTemplate(template)) is None


@pytest.mark.parametrize(
    ("prompt", "is_opened"),
    [(OPEN_PROMPT, True), (HYBRID_PROMPT, False), ("<think>\n\n</think>\n\n", False), ("<think>", True)],
)
def test_a_prompt_opens_a_thought_if_it_ends_with_its_tag(prompt: str, is_opened: bool) -> None:
    assert HYBRID_FORMAT.is_opened_by(prompt) == is_opened == OPENED_FORMAT.is_opened_by(prompt)


@pytest.mark.parametrize(
    ("format", "prompt", "reply", "thought", "answer"),
    [
        (HYBRID_FORMAT, HYBRID_PROMPT, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (HYBRID_FORMAT, HYBRID_PROMPT, "\n<think>Hm.</think>Yes.", "Hm.", "Yes."),
        (HYBRID_FORMAT, HYBRID_PROMPT, "<think>\n\nHm.\n\n\n</think>\n\n\nYes.", "\nHm.\n\n", "\nYes."),
        (HYBRID_FORMAT, HYBRID_PROMPT, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (HYBRID_FORMAT, HYBRID_PROMPT, "<think></think>Yes.", "", "Yes."),
        (HYBRID_FORMAT, HYBRID_PROMPT, "<think>\na < b </thin\n", "a < b </thin\n", ""),
        (HYBRID_FORMAT, HYBRID_PROMPT, "<think>\nHm.\n</think>\n\n", "Hm.", ""),
        (HYBRID_FORMAT, HYBRID_PROMPT, "<thi", "", "<thi"),
        (HYBRID_FORMAT, HYBRID_PROMPT, " Yes.", "", " Yes."),
        (HYBRID_FORMAT, HYBRID_PROMPT, "Yes. <think>No.</think>", "", "Yes. <think>No.</think>"),
        (HYBRID_FORMAT, HYBRID_PROMPT, "<think>\nA\n</think>\n\n<think>B</think>", "A", "<think>B</think>"),
        (HYBRID_FORMAT, OPEN_PROMPT, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (HYBRID_FORMAT, OPEN_PROMPT, "\nHm.\n</think>\n\nYes.", "\nHm.", "Yes."),
        (HYBRID_FORMAT, OPEN_PROMPT.rstrip(), "\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (HYBRID_FORMAT, OPEN_PROMPT, "Hm", "Hm", ""),
        (HYBRID_FORMAT, OPEN_PROMPT, "\n</think>\n\nYes.", "", "Yes."),
        (OPENED_FORMAT, OPEN_PROMPT, "\n Hm.\n\n </think>\n\n\n Yes. ", "Hm.", "Yes. "),
        (OPENED_FORMAT, HYBRID_PROMPT, " <think> Hm. </think> Yes.", "Hm.", "Yes."),
        (
            HEADED_FORMAT,
            "<|im_start|>assistant",
            "<|channel|>analysis<|message|>Hm.<|end|><|im_start|>assistant<|channel|>final<|message|>Yes.",
            "Hm.",
            "Yes.",
        ),
        (
            HEADED_FORMAT,
            "<|im_start|>assistant",
            "<|channel|>analysis<|message|>A<|end|><|im_start|>assistant<|channel|>commentary<|message|>b"
            "<|end|><|im_start|>assistant<|channel|>analysis<|message|>C<|end|>"
            "<|im_start|>assistant<|channel|>final<|message|>d",
            "AC",
            "bd",
        ),
        (HEADED_FORMAT, "<|im_start|>assistant", "<|channel|>final<|message|>Yes.", "", "Yes."),
        (HEADED_FORMAT, "<|im_start|>assistant", "<|channel|>analysis<|message|>Hm", "Hm", ""),
        (HEADED_FORMAT, "<|im_start|>assistant", '{"a": "<|message|><|end|>"}', "", '{"a": "<|message|><|end|>"}'),
        (
            HEADED_FORMAT,
            "<|im_start|>assistant",
            "<|channel|>" + "x" * MAX_HEADER,
            "",
            "<|channel|>" + "x" * MAX_HEADER,
        ),
        (
            ReasoningFormat("<t>", "</t>", bare="</t>"),
            "",
            "</t>Yes.",
            "",
            "Yes.",
        ),
    ],
)
def test_a_reply_is_split_in_the_same_way_however_it_is_cut(
    format: ReasoningFormat, prompt: str, reply: str, thought: str, answer: str
) -> None:
    dice = random.Random(reply)
    for size in (1, 2, 3, 5, 8, len(reply), None):
        splitter, said, place = splitter_of(format, prompt), ReplyPiece(), 0
        while place < len(reply):
            step = size or dice.randint(1, 9)
            said = said.followed_by(splitter.push(reply[place : place + step]))
            place += step
        assert said.followed_by(splitter.finish()) == (thought, answer), size


def test_a_thought_is_sent_as_soon_as_it_is_certain() -> None:
    splitter = splitter_of(HYBRID_FORMAT, OPEN_PROMPT)
    assert splitter.push("Hm") == ("Hm", "") and splitter.is_thinking
    assert splitter.push(" a <") == (" a ", "")
    assert splitter.push(" b\n") == ("< b", "")
    assert splitter.push("c\n</think>") == ("\nc", "") and not splitter.is_thinking and not splitter.is_answering
    assert splitter.push("\n\nYes") == ("", "Yes") and splitter.is_answering


@pytest.mark.parametrize("name", ["hybrid", "headed", "parts"])
def test_a_thought_that_is_sent_back_stands_in_the_prompt_as_it_was_said(name: str) -> None:
    """So that its keys and values are found again."""
    source, format = FORMATS[name]
    template, asked = ChatTemplate(source), {"role": "user", "content": "a"}
    prompt = template.render([asked])
    said = f"{format.begin}Hm. \n a{format.end}Yes."
    splitter = splitter_of(format, prompt)
    thought, answer = splitter.push(said)
    assert (thought, answer) == ("Hm. \n a", "Yes.")
    reply = {"role": "assistant", "content": answer, "reasoning_content": thought}
    later = template.render(format.for_template([asked, reply]), add_generation_prompt=False)
    assert later.startswith(prompt + said)


def test_a_thought_gets_the_name_that_the_template_reads() -> None:
    reply = {"role": "assistant", "content": "a", "reasoning_content": "b"}
    assert HEADED_FORMAT.for_template([reply]) == [{"role": "assistant", "content": "a", "thinking": "b"}]
    [part] = FORMATS["parts"][1].for_template([reply])
    assert part["content"] == [{"type": "thinking", "thinking": "b"}, {"type": "text", "text": "a"}]
    for others in (OPENED_FORMAT.for_template([reply]), without_reasoning([reply])):
        assert others == [{"role": "assistant", "content": "a"}]
