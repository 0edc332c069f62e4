"""Options of how to choose tokens, which several commands share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click
from radixlm.runtime.artifact.manifest import USUAL_SAMPLING

if TYPE_CHECKING:
    from radixlm.runtime import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class SamplingOptions:
    """What the user wishes of the reply; None is the model's default."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: tuple[str, ...]
    stop_regex: tuple[str, ...]
    banned_strings: tuple[str, ...]

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """`defaults` with what the user wishes instead.

        Raises:
            InvalidParameter: a value is outside its range.
        """
        wishes = dataclasses.asdict(self)
        return dataclasses.replace(defaults, **{k: v for k, v in wishes.items() if v not in (None, ())})


def _defaulted(name: str, about: str) -> Callable[[F], F]:
    """An option whose default the model's makers recommend, or is the usual one."""
    usual = getattr(USUAL_SAMPLING, name)
    text = f"{about}  [default: the model's, else {usual:g}]"
    return click.option(f"--{name.replace('_', '-')}", type=type(usual), help=text)


def sampling_options(function: F) -> F:
    """Add the fields of `SamplingOptions` as options; the function gets them as keyword arguments."""
    for option in (
        click.option("--stop", multiple=True, metavar="TEXT", help="End the reply before this; repeatable."),
        click.option(
            "--stop-regex",
            multiple=True,
            metavar="REGEX",
            help="End the reply before the first match of this regular expression; repeatable.",
        ),
        click.option(
            "--ban",
            "banned_strings",
            multiple=True,
            metavar="TEXT",
            help="Have the reply go on without this, in whatever case; repeatable.",
        ),
        click.option("--seed", type=int, help="Make sampling repeatable."),
        _defaulted("repetition_penalty", "Above 1, repeat less."),
        _defaulted("min_p", "Drop tokens below this share of the best one's probability."),
        _defaulted("top_p", "Sample from the tokens that make up this probability."),
        _defaulted("top_k", "Sample from this many tokens; 0 is all."),
        _defaulted("temperature", "0 always takes the most likely token."),
        click.option("--max-tokens", type=int, help="Most tokens of a reply."),
    ):
        function = option(function)
    return function
