"""A conversation in the terminal: what was said, and the next reply as it comes, which Ctrl-C stops.

Knows messages and how to show a reply; `chat.py` knows where the questions come from.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from radixlm.runtime import Completion, Engine, SamplingParams

_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass
class Conversation:
    """Messages so far, and the engine that answers."""

    engine: Engine
    params: SamplingParams
    system: str  # the system prompt; empty: none, and the chat template may put its own
    messages: list[dict[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was said, but not the system prompt."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> Completion:
        """Print the reply to `text` as it comes, then a dim line about it. Ctrl-C stops the reply.

        A stopped reply stays in the conversation as far as it went; one without text is forgotten, with its
        question.

        Raises:
            RadixLMError: there is no reply; the conversation is as it was before.
        """
        question = {"role": "user", "content": text}
        with (
            self.engine.stream_chat([*self.messages, question], self.params) as stream,
            interrupts(stream.cancel),
        ):
            is_thinking = False
            for delta in stream:
                if delta.thought:
                    is_thinking = True
                    click.secho(shown(delta.thought), nl=False, dim=True)
                if delta.text:
                    text = shown(delta.text)
                    click.echo(f"\n\n{text}" if is_thinking else text, nl=False)
                    is_thinking = False
            completion = stream.result()
        click.echo()
        click.secho(summary(completion), dim=True)
        if completion.text:
            thought = {"reasoning_content": completion.thought} if completion.thought else {}
            self.messages += [question, {"role": "assistant", "content": completion.text, **thought}]
        return completion


def shown(text: str) -> str:
    """A reply's text without characters that steer a terminal, or the direction of what it shows.

    >>> shown("a\\x1b]0;title\\x07b\\n")
    'a]0;titleb\\n'
    """
    return _STEERING.sub("", text)


def summary(completion: Completion) -> str:
    """One line: tokens, speed, time to first token, what the cache spared, and how many guesses were right."""
    usage, timings = completion.usage, completion.timings
    parts = [f"{usage.completion_tokens} tokens"]
    if timings.decode_tokens_per_s is not None:
        parts.append(f"{timings.decode_tokens_per_s:.1f} tokens/s")
    if timings.time_to_first_token_s is not None:
        parts.append(f"first token after {timings.time_to_first_token_s * 1000:.0f} ms")
    parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens from the cache")
    if usage.drafted_tokens:
        parts.append(f"{usage.accepted_tokens} of {usage.drafted_tokens} guesses right")
    if completion.finish_reason != "stop":
        parts.append({"length": "cut at the length limit", "cancelled": "stopped"}[completion.finish_reason])
    return " · ".join(parts)


@contextmanager
def interrupts(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` for each SIGINT within the block, instead of raising KeyboardInterrupt.

    An exception hits cleaning up, too, so that two quick ones would end the program. The main thread must enter the
    block; `action` runs in it.
    """
    previous = signal.signal(signal.SIGINT, lambda signum, frame: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
