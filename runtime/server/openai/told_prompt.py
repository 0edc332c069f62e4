"""What replies say of a prompt's own tokens: logprobs in OpenAI's shape, where the prompt is echoed, and in vLLM's.

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
class ToldPrompt:
    """The prompt of one completion.

    Attributes:
        tokens: where the text of what follows begins.
        echoed: `choices[].logprobs` of the prompt's tokens; None: they are not asked for.
        by_id: `choices[].prompt_logprobs`.
    """

    tokens: TextTokens
    echoed: TextLogprobs | None
    by_id: PromptLogprobsReply

    @classmethod
    def of(cls, names: TokenNames, body: CompletionRequest, told: PromptLogprobs, text: str) -> Self:
        """What `body` asks for of a prompt whose echo is `text`."""
        by_id = prompt_logprobs(names, told, body.prompt_logprobs)
        if not body.echoes_logprobs:
            return cls(TextTokens(names), None, by_id)
        spelled = b"".join(map(names.token_bytes, told.token_ids)).decode(errors="replace")
        # a token that begins the sequence, or a space before the first word, is no part of the text
        tokens = TextTokens(names, len(spelled) - len(text) if spelled.endswith(text) else 0)
        return cls(tokens, tokens.prompt(told, body.logprobs or 0), by_id)


def prompt_logprobs(names: TokenNames, told: PromptLogprobs | None, num_top: int | None) -> PromptLogprobsReply:
    """vLLM's `prompt_logprobs`: at each place the token itself and the `num_top` most likely ones; unset where they are
    not asked for.
    """
    if told is None or num_top is None:
        return msgspec.UNSET
    reply: list[dict[str, PromptLogprobReply] | None] = []
    for logprob in told:
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
    """Those of a prompt and of the reply behind it."""
    if prompt is None or reply is None:
        return reply
    return TextLogprobs(
        prompt.tokens + reply.tokens,
        prompt.token_logprobs + reply.token_logprobs,
        prompt.top_logprobs + reply.top_logprobs,
        prompt.text_offset + reply.text_offset,
    )
