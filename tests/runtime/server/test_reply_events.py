"""The events of a reply, which all APIs encode: parts begin, get text and end, one after the other."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.chat.tools.known_formats import HERMES
from radixlm.runtime.chat.tools.tool_calls import ToolCallReader, read_whole
from radixlm.runtime.engine.completion import Delta
from radixlm.runtime.server.reply_events import PartBegin, PartEnd, PartText, ReplyEvent, ReplyEvents

CALL = HERMES.text_of([("now", '{"a": 1}')])
ANSWERS = st.sampled_from(["", "Yes.", "<tool_", CALL, "Let me see.\n\n" + CALL, CALL + "\n" + CALL, CALL[:-20]])


def reader() -> ToolCallReader:
    return ToolCallReader(HERMES, ["now"])


def pieces(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def said(reply: ReplyEvents) -> list[tuple[str, str | None, str]]:
    return [(part.kind, part.call and part.call.name, part.text) for part in reply.parts]


@settings(deadline=None)
@given(thought=st.sampled_from(["", "Hm, é."]), answer=ANSWERS, data=st.data())
def test_a_reply_has_the_same_parts_streamed_and_whole(thought: str, answer: str, data: st.DataObject) -> None:
    whole, streamed = ReplyEvents(reader()), ReplyEvents(reader())
    whole.push(Delta(answer, (), finish_reason="stop", thought=thought))
    deltas = [Delta("", (), thought=piece) for piece in pieces(thought, data)]
    deltas += [Delta(piece, ()) for piece in pieces(answer, data)]
    events = [event for delta in [*deltas, Delta("", (), finish_reason="stop")] for event in streamed.push(delta)]
    events += streamed.end()
    assert said(streamed) == said(whole) and streamed.has_calls == whole.has_calls
    assert_one_after_the_other(events)
    read = read_whole(answer, reader())
    assert [part.text for part in whole.parts if part.kind == "call"] == [call.arguments for call in read.calls]
    assert "".join(part.text for part in whole.parts if part.kind == "text") == read.content
    assert "".join(part.text for part in whole.parts if part.kind == "reasoning") == thought


def assert_one_after_the_other(events: list[ReplyEvent]) -> None:
    is_open, place = False, -1
    for event in events:
        match event:
            case PartBegin(part):
                assert not is_open and part.index == place + 1
                is_open, place = True, part.index
            case PartText(part, text):
                assert is_open and part.index == place and text
            case PartEnd(part):
                assert is_open and part.index == place
                is_open = False
    assert not is_open


def test_arguments_belong_to_their_call_though_a_thought_interrupts_it() -> None:
    reply = ReplyEvents(reader())
    reply.push(Delta(CALL[: CALL.index("1}")], ()))
    [_, begun, _] = reply.push(Delta("", (), thought="Hm."))
    assert isinstance(begun, PartBegin)
    [more, *_] = reply.push(Delta("1}\n</tool_call>", (), finish_reason="stop"))
    assert isinstance(more, PartText) and more.part.kind == "call"
    assert said(reply) == [("call", "now", '{"a": 1}'), ("reasoning", None, "Hm.")]
