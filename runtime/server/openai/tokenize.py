"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's format.

Nothing is computed or cached. Knows the tokenizer only through the engine.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...chat.chat_template import checked_kwargs
from ...errors import InvalidParameter
from ..models import ModelEndpoint, Models
from ..served import Served, json_response
from .messages import Conversation
from .requests import TokenId

MAX_BODY_BYTES = 4 << 20  # these texts have no context limit; a million tokens take some seconds


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Conversation | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # of a conversation: additional variables for the chat template
    add_special_tokens: bool = True  # the beginning-of-sequence token, if the model has one
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | msgspec.UnsetType = msgspec.UNSET  # unset if not requested


class DetokenizeReply(msgspec.Struct):
    prompt: str


class TokenizerInfoReply(msgspec.Struct):
    """vLLM's summary of a `tokenizer_config.json`, with which lm-evaluation-harness needs no tokenizer of its own."""

    bos_token: str | None  # its text, or None
    eos_token: str | None
    add_bos_token: bool
    model_max_length: int
    chat_template: str | None


async def tokenize(served: Served, request: Request, body: TokenizeRequest) -> Response:
    """`POST /tokenize`: return the ids of `prompt`, or of `messages` with the generation prompt after them."""
    return await served.work_queues.tokenization.run(request, partial(_tokenized, served, body))


async def detokenize(served: Served, request: Request, body: DetokenizeRequest) -> Response:
    """`POST /detokenize`: return the text of `tokens`, special tokens included."""
    decode = partial(served.engine.decode, body.tokens)
    return json_response(DetokenizeReply(await served.work_queues.tokenization.run(request, decode)))


TOKENIZE = ModelEndpoint(TokenizeRequest, lambda served, request, body: body, tokenize, max_bytes=MAX_BODY_BYTES)
DETOKENIZE = ModelEndpoint(DetokenizeRequest, lambda served, request, body: body, detokenize, max_bytes=MAX_BODY_BYTES)


async def tokenizer_info(models: Models, request: Request) -> Response:
    """`GET /tokenizer_info`: return the tokens that begin and end a text, and the chat template."""
    engine = models.of_query(request).engine
    info, template = engine.manifest.tokenizer, engine.prompts.chat_template
    return json_response(
        TokenizerInfoReply(
            bos_token=None if info.bos_token_id is None else engine.decode([info.bos_token_id]),
            eos_token=engine.decode(info.eos_token_ids[:1]) if info.eos_token_ids else None,
            add_bos_token=info.add_bos_token,
            model_max_length=engine.context_length,
            chat_template=None if template is None else template.source,
        )
    )


def _tokenized(served: Served, body: TokenizeRequest) -> Response:
    """Return the response of `/tokenize`: the ids, their number and, if asked for, their texts."""
    ids = _encoded(served, body)
    texts = [served.token_text(token_id) for token_id in ids] if body.return_token_strs else msgspec.UNSET
    return json_response(TokenizeReply(len(ids), served.engine.context_length, ids, texts))


def _encoded(served: Served, body: TokenizeRequest) -> list[int]:
    """Return the token ids of a text or of a conversation.

    Raises:
        InvalidParameter: the body has both, or neither.
    """
    engine = served.engine
    if (body.prompt is None) == (body.messages is None):
        raise InvalidParameter("send either prompt, a text, or messages, a conversation")
    if body.prompt is not None:
        return engine.encode(body.prompt, add_bos=None if body.add_special_tokens else False)
    kwargs = None if body.chat_template_kwargs is None else checked_kwargs(body.chat_template_kwargs)
    return engine.encode_chat([message.to_template() for message in body.messages or ()], template_kwargs=kwargs)
