"""Log probabilities in the shapes of OpenAI's two kinds of completion.

Knows tokens and how to name them; where a reply's text begins is the caller's.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from ...engine.completion import TokenLogprob
from .replies import ChatLogprob, ChatLogprobs, TextLogprobs, TopLogprob


class TokenNames(Protocol):
    """What tokens spell, each by itself; `Served` is one."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


def chat_logprobs(names: TokenNames, logprobs: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
    """As `choices[].logprobs` of a chat; None if nobody asked."""
    if logprobs is None:
        return None
    content = []
    for logprob in logprobs:
        top = [_top(names, token_id, value) for token_id, value in logprob.top]
        own = _top(names, logprob.token_id, logprob.logprob)
        content.append(ChatLogprob(own.token, own.logprob, own.bytes, top))
    return ChatLogprobs(content)


class TextTokens:
    """The tokens of one completion, each with the place in the reply's text where it begins.

    Places are counted by what the tokens spell: text that may become a stop string is sent later than its tokens.

    Args:
        num_swallowed: how many characters the tokens begin with that are not in the reply's text. A token that begins
            before the text is said to begin with it.
    """

    def __init__(self, names: TokenNames, num_swallowed: int = 0) -> None:
        self._names = names
        self._offset = -num_swallowed
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def logprobs(self, logprobs: Sequence[TokenLogprob] | None) -> TextLogprobs | None:
        """`choices[].logprobs` for the next tokens, or for all; None if the client does not ask for them."""
        if logprobs is None:
            return None
        reply = TextLogprobs([], [], [], [])
        for logprob in logprobs:
            reply.tokens.append(_name(self._names, logprob.token_id))
            reply.token_logprobs.append(logprob.logprob)
            reply.top_logprobs.append(_top_by_name(self._names, logprob))
            reply.text_offset.append(max(self._offset, 0))
            self._offset += len(self._characters.decode(self._names.token_bytes(logprob.token_id)))
        return reply


def _top(names: TokenNames, token_id: int, logprob: float) -> TopLogprob:
    return TopLogprob(names.token_text(token_id), logprob, list(names.token_bytes(token_id)))


def _top_by_name(names: TokenNames, logprob: TokenLogprob) -> dict[str, float]:
    """The most likely tokens; one whose name another one has, as bytes and letters may, is `token_id:ID`, as in vLLM.

    The generated token keeps its name, by which clients look for it here.
    """
    id_of = {_name(names, logprob.token_id): logprob.token_id}
    top: dict[str, float] = {}
    for token_id, value in logprob.top:
        name = _name(names, token_id)
        top[name if id_of.setdefault(name, token_id) == token_id else f"token_id:{token_id}"] = value
    return top


def _name(names: TokenNames, token_id: int) -> str:
    """A token's text, or OpenAI's `bytes:\\xf0\\x9f` for a part of a character: names must differ."""
    try:
        names.token_bytes(token_id).decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in names.token_bytes(token_id))
    return names.token_text(token_id)
