"""A chat request in the engine's terms: the one path from every API to the engine.

Each API translates its request body into an `ChatTask`, and the reply's events into its own format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request

from ..chat.grammar import Grammar
from ..chat.token_constraint import ConstraintSource
from ..chat.tools.tool_calls import ToolCall
from ..chat.tools.tool_format import Tool
from ..chat.tools.tool_use import ToolUse
from ..engine.request_options import RequestOptions, require_few_reply_logprobs
from ..engine.sampling_params import SamplingParams
from ..errors import InvalidGrammar
from .choices import Choices, params_of_choices
from .reply_events import ReplyEvents
from .request_log import record_of
from .served import Served
from .truncation import Message, TruncatedHistory


@dataclass(frozen=True)
class ChatTask:
    """A chat request in the engine's terms, whichever API it came by.

    Args:
        messages: in the form that chat templates take.
        options: without tools and constraint, which come from `use`.
        content: returns the grammar of a reply that is not a tool call; None: any text.
        parameters_field: returns the request field that has the parameters of the n-th tool, for errors.
        naming: a context that names the request field of `content` in errors.
        content_field: the same field, for the header that lists partly enforced schemas.
        num_choices: number of replies. With a seed, the n-th reply uses the seed plus n.
        truncates: drop turns that do not fit into the context.
        known_as: returns a tool call of the reply under each id that the client may send it back with.
    """

    messages: Sequence[Message]
    params: SamplingParams
    options: RequestOptions
    use: ToolUse
    parameters_field: Callable[[int], str]
    content: Callable[[], Grammar | None] = lambda: None
    naming: Callable[[], AbstractContextManager[None]] = nullcontext
    content_field: str = "response_format"
    num_choices: int = 1
    truncates: bool = False
    known_as: Callable[[ToolCall], Iterable[ToolCall]] = lambda call: (call,)

    async def open(self, served: Served, request: Request) -> RunningChat:
        """Submit the request to the engine. Returns the running replies and the history that they answer.

        Raises:
            InvalidRequest, EngineError: the engine refuses the request.
            ClientGone: the client disconnected before it was submitted.
        """
        if self.use.tools:  # clients with tools need grammars sooner or later, others never do
            served.engine.expect_grammars()
        require_few_reply_logprobs(self.num_choices, self.params, served.engine.context_length)
        options = self.options.changed(constraint=await self._make_constraint(served, request), tools=self.use.tools)
        truncated = TruncatedHistory(self.messages)
        if self.truncates:
            truncated = await served.truncated(request, self.messages, options, max_tokens=self.params.max_tokens)
            if truncated.dropped:
                options = options.changed(earlier=None)
        ask = partial(served.engine.stream_chat, truncated.messages, options=options)
        wishes = [self.params]
        if self.num_choices > 1:
            run = partial(served.work_queues.submission.run, request, may_hold_loop=False)
            wishes = await run(partial(params_of_choices, self.params, self.num_choices))
        asks = [partial(ask, wish) for wish in wishes]
        choices = await served.open(request, asks, self.params)
        return RunningChat(choices, truncated)

    def reply(self, served: Served, choices: Choices, index: int = 0) -> ReplyEvents:
        """Return the converter of one reply's deltas to events.

        It registers the reply's tool calls with the engine, which recognizes them in later prompts.
        """

        def note(call: ToolCall) -> None:
            for each in self.known_as(call):
                served.engine.note_call(each, options=self.options, stream=choices.stream(index))

        return ReplyEvents(self.use.reader(served.engine.tool_format, note, has_schema=self.content() is not None))

    async def _make_constraint(self, served: Served, request: Request) -> ConstraintSource | None:
        """Return the constraint of the replies: by the request's grammar and the tools; None for any text.

        A schema that cannot be enforced is relaxed, and listed in the header.
        """
        with self.naming():
            content = await served.work_queues.submission.run(request, self.content)
            if content is None:
                return await self._constrain_calls(served, request, None)
            return await served.as_far_as_followed(
                request, content, partial(self._constrain_calls, served, request), field=self.content_field
            )

    async def _constrain_calls(
        self, served: Served, request: Request, content: Grammar | None
    ) -> ConstraintSource | None:
        """Return the constraint of replies that match `content` or call tools; schemas that are refused are reduced."""
        if not self.use.tools:
            return await served.constraint(request, content)
        run = partial(served.work_queues.submission.run, request)  # writing the grammar of many tools takes a while
        held = await run(partial(self.use.held, served.engine.tool_format, content, self.parameters_field))
        while True:
            try:
                constraint = await served.constraint(request, held.grammar)
                break
            except InvalidGrammar as error:
                await run(partial(held.loosen, error))
        self._list_loose_tools(request, [self.use.callable[place] for place in held.loose])
        return constraint

    def _list_loose_tools(self, request: Request, loose: Sequence[Tool]) -> None:
        """List tools whose schemas are only partly enforced in the response's header: `tools.NAME.input_schema`."""
        ignored = record_of(request).ignored
        if ignored is not None and loose:
            places = {tool.name: place for place, tool in enumerate(self.use.tools)}
            fields = [self.parameters_field(places[tool.name]) for tool in loose]
            ignored.harmless |= {
                f"{field.partition('[')[0]}.{tool.name}{field.rpartition(']')[2]}"
                for tool, field in zip(loose, fields, strict=True)
            }


@dataclass(frozen=True)
class RunningChat:
    """The running replies to a chat request, and the history that they answer."""

    choices: Choices
    truncated: TruncatedHistory
