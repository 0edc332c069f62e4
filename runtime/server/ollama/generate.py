"""`POST /api/generate`: the reply to one prompt, whole or streamed.

The prompt becomes a user message in the chat template, or with `raw` the text itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...chat.tools.tool_use import ToolUse
from ...engine.request_options import RequestOptions
from ...engine.sampling_params import SamplingParams
from ..chat_task import ChatTask
from ..lenient.shapes import relaxing
from ..models import ModelEndpoint
from ..openai.response_format import named_grammar
from ..reply_events import ReplyEvents
from ..served import Served
from .answer import Answer, loaded
from .chat import answer_chat, chat_task
from .replies import CallReply, OllamaGenerateReply
from .requests import OllamaGenerateRequest

_NO_TOOLS = ToolUse((), (), "auto", is_parallel=True)


@dataclass(frozen=True)
class _Raw:
    """A text to continue without a chat template."""

    prompt: str
    params: SamplingParams
    options: RequestOptions


Prepared = tuple[OllamaGenerateRequest, ChatTask | _Raw | None, float | None]


def _prepare(served: Served, request: Request, body: OllamaGenerateRequest) -> Prepared:
    """Return the body, its task and how long the model stays loaded; no task without a prompt: it loads it."""
    stays_loaded_s = body.stays_loaded_s
    if not body.prompt:
        chat_task(served, request, body, (), use=_NO_TOOLS)  # checks the fields
        return body, None, stays_loaded_s
    has_template = served.engine.prompts.chat_template is not None
    if body.raw or not (has_template or body.system):
        return body, _raw(served, request, body, body.prompt), stays_loaded_s
    messages: list[dict[str, object]] = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": body.prompt})
    return body, chat_task(served, request, body, messages, use=_NO_TOOLS), stays_loaded_s


def _raw(served: Served, request: Request, body: OllamaGenerateRequest, prompt: str) -> _Raw:
    served.leave_out(request, unread=(), others=body.left_out(served.engine.context_length))
    params = body.sampling_params(served.engine.default_params, context_length=served.engine.context_length)
    return _Raw(prompt, params, served.request_options(request, body))


async def create(served: Served, request: Request, prepared: Prepared) -> Response:
    """`POST /api/generate`: return the reply, whole or as a stream."""
    body, asked_of_engine, stays_loaded_s = prepared
    match asked_of_engine:
        case None:
            return loaded(_line, served.called(body.model), stays_loaded_s)
        case ChatTask():
            return await answer_chat(served, request, body, asked_of_engine, _line)
        case _Raw(prompt, params, options):
            with named_grammar("format"):
                content = body.grammar()
                if content is not None:
                    constrain = partial(served.constraint, request)
                    constraint = await served.as_far_as_followed(request, content, constrain, field="format")
                    options = options.changed(constraint=constraint, strip_suffix=False)
            choices = await served.open(
                request, [partial(served.engine.stream, prompt, params, options=options)], params
            )
            answer = Answer(served, served.called(body.model), choices, ReplyEvents(), _line)
            return await answer.respond(request, streams=body.streams)


def _line(content: str = "", thinking: str = "", calls: Sequence[CallReply] = (), **fields: Any) -> OllamaGenerateReply:
    return OllamaGenerateReply(response=content, thinking=thinking or msgspec.UNSET, **fields)


GENERATE = ModelEndpoint(OllamaGenerateRequest, _prepare, create, leave_out=relaxing((), OllamaGenerateRequest))
