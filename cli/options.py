"""Options that several commands share: how to compile a model that is no artifact yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class CompileOptions:
    """How to compile a model that is no artifact yet; None is the compiler's default."""

    quantize: str | None
    kv_dtype: str | None

    def artifact_of(
        self,
        model: str,
        say: Callable[[str], None] | None = None,
        meanwhile: AbstractContextManager[None] | None = None,
        *,
        written: Callable[[Path], None] | None = None,
        kept: Callable[[str], None] | None = None,
        on_disk: bool = False,
    ) -> Path:
        """Return the artifact of `model`, as `cached_artifact.artifact_of` does."""
        from .cached_artifact import artifact_of

        given = {"quantize": self.quantize, "kv-dtype": self.kv_dtype}
        options = {name: value for name, value in given.items() if value is not None}
        return artifact_of(model, options, say, meanwhile, written=written, kept=kept, on_disk=on_disk)


def compile_options(function: F) -> F:
    """Add the fields of `CompileOptions` as options; the function gets them as keyword arguments."""
    for option in (
        click.option(
            "--kv-dtype",
            type=click.Choice(["auto", "f16", "f32", "k12v8"]),
            help="Where MODEL is compiled now: how to store keys and values.  [default: auto]",
        ),
        click.option(
            "--quantize",
            type=click.Choice(["keep", "q4", "q8", "f16", "f32"]),
            help="Where MODEL is compiled now: how to store the weights.  [default: keep]",
        ),
    ):
        function = option(function)
    return function


T = TypeVar("T", bound="DataclassInstance")


def take(kind: type[T], options: dict[str, Any]) -> T:
    """The keyword arguments of a command that are the fields of `kind`, taken out of all of them."""
    return kind(**{field.name: options.pop(field.name) for field in dataclasses.fields(kind)})
