"""`POST /api/chat`: the next reply of a conversation, whole or streamed.

Translates only: `chat_task.py` submits the chat to the engine, as for Chat Completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..chat_task import ChatTask
from ..lenient.shapes import relaxing
from ..models import ModelEndpoint
from ..openai.replies import TruncationReply
from ..openai.response_format import named_grammar
from ..openai.tools import parameters_field
from ..served import Served
from .about import require_thinking
from .answer import Answer, loaded
from .conversation import for_template, known_as
from .replies import CallReply, OllamaChatReply, OllamaMessageReply
from .requests import OllamaChatRequest, ReplyRequest

Prepared = tuple[OllamaChatRequest, ChatTask | None, float | None]


def chat_task(
    served: Served, request: Request, body: ReplyRequest, messages: Sequence[dict[str, object]], **options: Any
) -> ChatTask:
    """Return the chat request for the engine, with further fields of `ChatTask`.

    Raises:
        HTTPError, InvalidParameter: 400 if the model or the server does not support a value.
    """
    require_thinking(served, body)
    served.leave_out(request, unread=(), others=body.left_out(served.engine.context_length))
    return ChatTask(
        messages,
        body.sampling_params(served.engine.default_params, context_length=served.engine.context_length),
        served.request_options(request, body).changed(template_kwargs=body.template_kwargs),
        parameters_field=parameters_field,
        content=body.grammar,
        naming=partial(named_grammar, "format"),
        content_field="format",
        truncates=served.truncates(body.truncation),
        known_as=known_as,
        **options,
    )


async def answer_chat(served: Served, request: Request, body: ReplyRequest, chat: ChatTask, make_line: Any) -> Response:
    """Return the response with the reply to a conversation."""
    opened = await chat.open(served, request)
    truncation = TruncationReply.of(opened.truncated) if chat.truncates else msgspec.UNSET
    answer = Answer(
        served, served.called(body.model), opened.choices, chat.reply(served, opened.choices), make_line, truncation
    )
    return await answer.respond(request, streams=body.streams)


def _prepare(served: Served, request: Request, body: OllamaChatRequest) -> Prepared:
    """Return the body, its chat task and how long the model stays loaded; no task without messages: they load it.

    Its fields are checked all the same.
    """
    stays_loaded_s = body.stays_loaded_s
    chat = chat_task(served, request, body, for_template(body.messages or []), use=body.tool_use())
    return body, chat if body.messages else None, stays_loaded_s


async def create(served: Served, request: Request, prepared: Prepared) -> Response:
    """`POST /api/chat`: return the reply, whole or as a stream."""
    body, chat, stays_loaded_s = prepared
    if chat is None:
        return loaded(_line, served.called(body.model), stays_loaded_s)
    return await answer_chat(served, request, body, chat, _line)


def _line(content: str = "", thinking: str = "", calls: Sequence[CallReply] = (), **fields: Any) -> OllamaChatReply:
    """Return a line of a chat's reply."""
    message = OllamaMessageReply(
        content=content, thinking=thinking or msgspec.UNSET, tool_calls=list(calls) or msgspec.UNSET
    )
    return OllamaChatReply(message=message, **fields)


CHAT = ModelEndpoint(OllamaChatRequest, _prepare, create, leave_out=relaxing((), OllamaChatRequest))
