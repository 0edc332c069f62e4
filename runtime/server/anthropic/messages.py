"""`POST /v1/messages`, whole or streamed, and `/v1/messages/count_tokens`.

Translates only: `chat_task.py` submits the chat to the engine, as for Chat Completions.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...chat.tools.arguments import read_cut
from ...engine.completion import Completion, Delta, PrefillProgress
from ..chat_task import ChatTask, RunningChat
from ..choices import Choices
from ..http.connection import while_connected
from ..http.sse import EventStream, named_event
from ..lenient.shapes import MESSAGES as SHAPES
from ..lenient.shapes import relaxing
from ..models import ModelEndpoint
from ..openai.replies import PromptProgressReply, TruncationReply
from ..openai.reply_parts import usage_of
from ..openai.response_format import named_grammar
from ..openai.tokenize import MAX_BODY_BYTES
from ..reply_events import PartBegin, PartEnd, PartText, ReplyEvent, ReplyEvents, ReplyPart
from ..request_log import new_id, record_of
from ..served import Served, json_response, whole_answer
from .conversation import Conversation
from .replies import (
    PING,
    BlockDelta,
    BlockReply,
    BlockStart,
    BlockStop,
    CountTokensReply,
    InputJsonDelta,
    MessageDelta,
    MessageReply,
    MessageStart,
    MessageStop,
    MessagesUsage,
    Ping,
    SignatureDelta,
    StopDelta,
    StopReason,
    TextBlockReply,
    TextDelta,
    ThinkingBlockReply,
    ThinkingDelta,
    ThinkingTokens,
    ToolUseBlockReply,
)
from .requests import CountTokensRequest, MessagesRequest, leave_out_of_counting

SIGNATURE = "unsigned"  # clients drop reasoning without a signature; it is not checked when it comes back
Prepared = tuple[MessagesRequest, Conversation, ChatTask]
Encode = Callable[[], list[int]]
_DELTAS = {"reasoning": ThinkingDelta, "text": TextDelta, "call": InputJsonDelta}


def _prepare(served: Served, request: Request, body: MessagesRequest) -> Prepared:
    """Check the body, and translate it to the chat that the engine gets."""
    conversation = _conversation(served, request, body)
    options = served.request_options(request, body)
    chat = ChatTask(
        conversation.messages,
        body.sampling_params(served.engine.default_params),
        options.changed(template_kwargs=body.template_kwargs, with_progress=bool(body.stream)),
        use=body.tool_use(),
        parameters_field=body.parameters_field,
        content=body.grammar,
        naming=partial(named_grammar, "output_config.format.schema"),
        content_field="output_config.format.schema",
        truncates=served.truncates(body.truncation),
    )
    return body, conversation, chat


async def create(served: Served, request: Request, prepared: Prepared) -> Response:
    """`POST /v1/messages`: return the reply, whole or as a stream."""
    body, conversation, chat = prepared
    opened = await chat.open(served, request)
    choices = opened.choices
    truncation = _truncation(chat, opened, conversation)
    message = _Message(served, body, chat, chat.reply(served, choices), truncation, is_marked=_has_marks(request))
    if body.stream:
        events, keep_alive_s = message.events(choices), served.options.keep_alive_s
        return EventStream(events, choices, encode=named_event, done=b"", keep_alive_s=keep_alive_s, comment=PING)
    async with choices:
        [completion] = await while_connected(request.receive, choices.results())
    return await whole_answer([completion], lambda: message.whole(completion))


def _encoding(served: Served, request: Request, body: CountTokensRequest) -> Encode:
    conversation, use = _conversation(served, request, body), body.tool_use()
    return partial(served.engine.encode_chat, conversation.messages, use.tools, body.template_kwargs)


async def count_tokens(served: Served, request: Request, encode: Encode) -> Response:
    """`POST /v1/messages/count_tokens`: return the number of prompt tokens of a conversation."""
    ids = await served.work_queues.tokenization.run(request, encode)
    return json_response(CountTokensReply(len(ids)))


def _conversation(served: Served, request: Request, body: CountTokensRequest) -> Conversation:
    """Translate the messages, and list the ignored parts in the response's header."""
    conversation = Conversation.of(body.system, body.messages)
    served.leave_out(request, unread=conversation.unread, others=conversation.ignored | body.ignored)
    return conversation


MESSAGES = ModelEndpoint(MessagesRequest, _prepare, create, leave_out=relaxing(SHAPES, MessagesRequest))
COUNT_TOKENS = ModelEndpoint(
    CountTokensRequest,
    _encoding,
    count_tokens,
    max_bytes=MAX_BODY_BYTES,
    leave_out=relaxing(SHAPES, CountTokensRequest, leave_out_of_counting),
)


class _Message:
    """One reply in Anthropic's format, whole or as events."""

    def __init__(
        self,
        served: Served,
        body: MessagesRequest,
        chat: ChatTask,
        reply: ReplyEvents,
        truncation: TruncationReply | msgspec.UnsetType,
        *,
        is_marked: bool,
    ) -> None:
        self._served, self._chat, self._events = served, chat, reply
        self._tells_progress = bool(body.return_progress)
        self._is_kept = is_marked and (chat.options.cache_match or served.engine.match) != "off"
        self._reply = partial(MessageReply, id=new_id("msg_"), model=served.called(body.model), truncation=truncation)

    def whole(self, completion: Completion) -> MessageReply:
        """Return the whole message."""
        self._events.push(Delta.whole(completion))
        end = self._end(completion)
        return self._reply(
            content=[_block(part, part.text) for part in self._events.parts],
            usage=self._usage(completion),
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            ended_in_reasoning=end.ended_in_reasoning,
        )

    async def events(self, choices: Choices) -> AsyncGenerator[msgspec.Struct]:
        """Yield Anthropic's events. The first has the number of cached prompt tokens, once that is known."""
        has_begun = False
        async for _, delta in choices:
            if not has_begun:
                yield MessageStart(self._reply(content=[], usage=self._usage_at_start(delta.progress)))
                has_begun = True
            elif delta.progress is not None:
                progress = PromptProgressReply.of(delta.progress) if self._tells_progress else msgspec.UNSET
                yield Ping(progress)
            events = self._events.push(delta)
            if delta.finish_reason is not None:
                events += self._events.end()
            for event in events:
                for sent in _events_of(event):
                    yield sent
        completion = choices.result(0)
        yield MessageDelta(self._end(completion), self._usage(completion))
        yield MessageStop()

    def _end(self, completion: Completion) -> StopDelta:
        """Return why the message ended, in Anthropic's words, with the stop sequence if one ended it."""
        sequence = completion.stop_reason
        if isinstance(sequence, str):
            return StopDelta("stop_sequence", sequence)
        if completion.finish_reason == "length":
            most = self._chat.params.max_tokens
            is_full = most is not None and len(completion.token_ids) < most
            reason: StopReason = "model_context_window_exceeded" if is_full else "max_tokens"
            return StopDelta(reason)
        ended_in_reasoning = completion.ended_in_reasoning or msgspec.UNSET
        return StopDelta("tool_use" if self._events.has_calls else "end_turn", ended_in_reasoning=ended_in_reasoning)

    def _usage(self, completion: Completion) -> MessagesUsage:
        """Return the usage of the finished reply, with the kinds of cached tokens."""
        usage = completion.usage
        is_kept = self._is_kept and usage.pruning is None  # KV computed with approximate loading is not cached
        counts = _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, is_kept=is_kept)
        if usage.thought_tokens:
            counts.output_tokens_details = ThinkingTokens(usage.thought_tokens)
        tells = self._served.options.tells_cached_text
        counts.prompt_tokens_details = usage_of([completion], tells_cached_text=tells).prompt_tokens_details
        return counts

    def _usage_at_start(self, progress: PrefillProgress | None) -> MessagesUsage:
        """Return the usage before the first token: the prompt's tokens and the cached ones."""
        if progress is None:
            return _usage(0, 0, 0, is_kept=False)
        return _usage(progress.num_prompt_tokens, progress.num_cached_tokens, 0, is_kept=self._is_kept)


def _usage(num_prompt: int, num_cached: int, num_generated: int, *, is_kept: bool) -> MessagesUsage:
    """Return Anthropic's token counts.

    Args:
        is_kept: count computed prompt tokens as cache creation, because the client sent `cache_control`.
    """
    num_computed = num_prompt - num_cached
    return MessagesUsage(
        input_tokens=0 if is_kept else num_computed,
        cache_creation_input_tokens=num_computed if is_kept else 0,
        cache_read_input_tokens=num_cached,
        output_tokens=num_generated,
    )


def _block(part: ReplyPart, text: str) -> BlockReply:
    """Return a part of a reply as a block with this text. The arguments of a call may be incomplete."""
    if part.call is not None:
        return ToolUseBlockReply(part.call.call_id, part.call.name, read_cut(text))
    if part.kind == "text":
        return TextBlockReply(text)
    return ThinkingBlockReply(text, SIGNATURE if text else "")


def _events_of(event: ReplyEvent) -> Iterator[msgspec.Struct]:
    """Yield Anthropic's events for one event of a reply."""
    part = event.part
    match event:
        case PartBegin():
            yield BlockStart(part.index, _block(part, ""))
        case PartText(_, text):
            yield BlockDelta(part.index, _DELTAS[part.kind](text))
        case PartEnd():
            if part.kind == "reasoning":
                yield BlockDelta(part.index, SignatureDelta(SIGNATURE))
            yield BlockStop(part.index)


def _has_marks(request: Request) -> bool:
    """Return whether anything in the body has `cache_control`, which only affects the counts."""
    ignored = record_of(request).ignored
    return ignored is not None and any(name.rpartition(".")[2] == "cache_control" for name in ignored.harmless)


def _truncation(chat: ChatTask, opened: RunningChat, conversation: Conversation) -> TruncationReply | msgspec.UnsetType:
    """Return which messages of the request were dropped, wholly or in part; UNSET if the request does not truncate."""
    if not chat.truncates:
        return msgspec.UNSET
    places = {conversation.places[each] for each in opened.truncated.dropped}
    dropped = tuple(sorted(place for place in places if place is not None))
    return TruncationReply("middle", dropped, opened.truncated.num_dropped_tokens)
