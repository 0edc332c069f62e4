"""Assemble one choice from a response or from the chunks of a stream, of chats and of texts.

Knows OpenAI's shapes; nothing of sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class ReplyError(Exception):
    """The response is not as it should be."""


@dataclass
class Reply:
    """The part of a choice that a client has received so far."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    is_done: bool = False  # the stream said [DONE]

    def take(self, body: dict[str, Any]) -> bool:
        """Append a response's or chunk's part of this choice; return whether it has text or tokens.

        Raises:
            ReplyError: `body` is an error, or comes after the end.
        """
        if "error" in body:
            raise ReplyError(f"an error instead: {body['error']}")
        if self.is_done:
            raise ReplyError("something follows [DONE]")
        self.usage = body.get("usage") or self.usage
        is_news = False
        for choice in (one for one in body["choices"] if one["index"] == self.index):
            self.prompt_token_ids += body.get("prompt_token_ids", [])
            if self.finish_reason is not None:
                raise ReplyError("a choice goes on after its finish_reason")
            part = choice.get("message") or choice.get("delta") or choice
            text = part.get("content") or part.get("text") or ""
            token_ids = choice.get("token_ids", [])
            self.text += text
            self.token_ids += token_ids
            self.prompt_token_ids += choice.get("prompt_token_ids", [])
            self.finish_reason = choice["finish_reason"]
            logprobs = choice.get("logprobs") or {}
            self.logprobs += [item["logprob"] for item in logprobs.get("content") or []]
            self.logprobs += logprobs.get("token_logprobs") or []
            is_news = is_news or bool(text or token_ids)
        return is_news

    def check_complete(self, *, is_stream: bool) -> None:
        """Raise ReplyError unless finish_reason is `stop` or `length`, and a stream ended with `[DONE]`."""
        if is_stream and not self.is_done:
            raise ReplyError("the stream ended without [DONE]")
        if self.finish_reason not in ("stop", "length"):
            raise ReplyError(f"finish_reason of choice {self.index} is {self.finish_reason!r}")


def check_usage(replies: Sequence[Reply]) -> None:
    """Raise ReplyError unless the counts of all choices equal those of the usage."""
    usage = replies[0].usage
    counts = len(replies[0].prompt_token_ids), sum(len(reply.token_ids) for reply in replies)
    if usage is None or counts != (usage["prompt_tokens"], usage["completion_tokens"]):
        raise ReplyError(f"{counts} tokens of prompt and replies, but usage is {usage}")
