"""`POST /api/chat`: a conversation's next reply, whole or as it is made.

A translation: `asked_chat.py` asks the engine, as for chat completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..asked_chat import AskedChat
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

Asked = tuple[OllamaChatRequest, AskedChat | None, float | None]


def asked_chat(
    served: Served, request: Request, body: ReplyRequest, messages: Sequence[dict[str, object]], **options: Any
) -> AskedChat:
    """Return what a body asks of the engine, with further fields of `AskedChat`.

    Raises:
        HTTPError, InvalidParameter: 400, a value is none that the model or the server takes.
    """
    require_thinking(served, body)
    served.leave_out(request, unread=(), others=body.left_out(served.engine.context_length))
    return AskedChat(
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


async def answer_chat(
    served: Served, request: Request, body: ReplyRequest, chat: AskedChat, make_line: Any
) -> Response:
    """Answer with the reply to a conversation."""
    opened = await chat.open(served, request)
    truncation = TruncationReply.of(opened.truncated) if chat.truncates else msgspec.UNSET
    answer = Answer(
        served, served.called(body.model), opened.choices, chat.reply(served, opened.choices), make_line, truncation
    )
    return await answer.respond(request, streams=body.streams)


def _asked(served: Served, request: Request, body: OllamaChatRequest) -> Asked:
    stays_loaded_s = body.stays_loaded_s
    if not body.messages:
        return body, None, stays_loaded_s
    chat = asked_chat(served, request, body, for_template(body.messages), use=body.tool_use())
    return body, chat, stays_loaded_s


async def create(served: Served, request: Request, asked: Asked) -> Response:
    """Answer one request."""
    body, chat, stays_loaded_s = asked
    if chat is None:
        return loaded(_line, served.called(body.model), stays_loaded_s)
    return await answer_chat(served, request, body, chat, _line)


def _line(content: str = "", thinking: str = "", calls: Sequence[CallReply] = (), **fields: Any) -> OllamaChatReply:
    said = OllamaMessageReply(
        content=content, thinking=thinking or msgspec.UNSET, tool_calls=list(calls) or msgspec.UNSET
    )
    return OllamaChatReply(message=said, **fields)


CHAT = ModelEndpoint(OllamaChatRequest, _asked, create, leave_out=relaxing((), OllamaChatRequest))
