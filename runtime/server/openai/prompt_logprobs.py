"""Logprobs of a prompt's tokens: in OpenAI's format if the prompt is echoed, and in vLLM's.

Knows values, not endpoints or streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import msgspec

from ...engine.completion import PromptLogprobs
from .replies import PromptLogprobReply, PromptLogprobsReply, TextLogprobs
from .reply_parts import TextTokens, TokenNames
from .requests import CompletionRequest


@dataclass(frozen=True)
class PromptLogprobFields:
    """The logprobs of the prompt of one completion.

    Attributes:
        tokens: converts the tokens after the prompt, and knows their offset in the text.
        echoed: `choices[].logprobs` of the prompt's tokens; None if not requested.
        by_id: `choices[].prompt_logprobs`.
    """

    tokens: TextTokens
    echoed: TextLogprobs | None
    by_id: PromptLogprobsReply

    @classmethod
    def of(cls, names: TokenNames, body: CompletionRequest, logprobs: PromptLogprobs, text: str) -> Self:
        """Return the logprobs that `body` requests, for a prompt with the text `text`."""
        by_id = prompt_logprobs(names, logprobs, body.prompt_logprobs)
        if not body.echoes_logprobs:
            return cls(TextTokens(names), None, by_id)
        spelled = b"".join(map(names.token_bytes, logprobs.token_ids)).decode(errors="replace")
        # a beginning-of-sequence token, or a space added before the first word, is not part of the text
        tokens = TextTokens(names, len(spelled) - len(text) if spelled.endswith(text) else 0)
        return cls(tokens, tokens.prompt(logprobs, body.logprobs or 0), by_id)


def prompt_logprobs(names: TokenNames, logprobs: PromptLogprobs | None, num_top: int | None) -> PromptLogprobsReply:
    """Return vLLM's `prompt_logprobs`: for each token, itself and the `num_top` most likely ones.

    UNSET if `logprobs` or `num_top` is None.
    """
    if logprobs is None or num_top is None:
        return msgspec.UNSET
    reply: list[dict[str, PromptLogprobReply] | None] = []
    for logprob in logprobs:
        if logprob is None:
            reply.append(None)
            continue
        ranked = [(logprob.token_id, logprob.logprob, logprob.rank)]
        ranked += ((token_id, value, rank) for rank, (token_id, value) in enumerate(logprob.top[:num_top], start=1))
        reply.append(
            {
                str(token_id): PromptLogprobReply(value, rank, names.token_text(token_id))
                for token_id, value, rank in ranked
            }
        )
    return reply


def joined(prompt: TextLogprobs | None, reply: TextLogprobs | None) -> TextLogprobs | None:
    """Join the logprobs of a prompt and of the reply after it."""
    if prompt is None or reply is None:
        return reply
    return TextLogprobs(
        prompt.tokens + reply.tokens,
        prompt.token_logprobs + reply.token_logprobs,
        prompt.top_logprobs + reply.top_logprobs,
        prompt.text_offset + reply.text_offset,
    )
