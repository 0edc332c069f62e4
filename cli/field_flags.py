"""Make flags from the declared engine options, server options and sampling parameters.

Also has the compile options that several commands share. Importing this module imports neither the engine nor NumPy, so
that help is fast.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .help_sections import SectionedCommand

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from radixlm.runtime import SamplingParams
    from radixlm.runtime.fields import Field

_TEXTS = (tuple[str, ...], Sequence[str])
_NAMED_PATHS = Mapping[str, str | Path]
_LEAST_LORAS, _LEAST_RANK = 8, 16  # room in a model that `serve --lora` compiles, so that others fit, too
ENGINE = ("disk", "speculation", "engine")  # groups of commands that generate


class JSONObject(click.ParamType[dict[str, Any]]):
    """A command-line parameter whose value is a JSON object."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """Parse the object.

        Raises:
            BadParameter: it is not a JSON object.
        """
        if isinstance(value, dict):
            return value
        try:
            read = json.loads(value)
        except ValueError as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)
        if not isinstance(read, dict):
            self.fail(f"{value!r} is not a JSON object", param, ctx)
        return read


class FieldCommand(SectionedCommand):
    """A command with flags made from declared fields, which it gets as keyword arguments by field name.

    Args:
        flags: groups of fields, or names of single fields.
        requires: names of required fields.
    """

    def __init__(self, *args: Any, flags: Sequence[str], requires: Sequence[str] = (), **more: Any) -> None:
        super().__init__(*args, **more)
        self._flags, self._requires = flags, requires
        self._options: list[click.Parameter] | None = None

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's own parameters, those of fields, and `--help`."""
        if self._options is None:
            chosen = (field for field in _fields().values() if field.about.flag is not None)
            self._options = [
                _option(field, field.name in self._requires)
                for field in chosen
                if not {field.name, field.about.flag.group}.isdisjoint(self._flags)  # type: ignore[union-attr]
            ]
        *own, last = super().get_params(ctx)
        return [*own, *self._options, last]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, and check that flags are given together with those that they need.

        Raises:
            InvalidParameter: a flag is given without one that it needs.
        """
        from radixlm.runtime.fields import check_needs

        left = super().parse_args(ctx, args)
        fields = _fields()
        given = {name: value for name, value in ctx.params.items() if name in fields and value is not None}
        check_needs(fields, given, _flag_of)
        return left


def engine_keywords(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the engine's options from a command's keyword arguments, and return those that were given.

    Raises:
        InvalidParameter: they contradict each other.
    """
    from radixlm.runtime.engine.engine_options import EngineOptions
    from radixlm.runtime.fields import fields_of

    taken = _taken(options, fields_of(EngineOptions))
    EngineOptions(**taken)
    return taken


def server_keywords(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the server's options from a command's keyword arguments, and return those that were given."""
    from radixlm.runtime.fields import fields_of
    from radixlm.runtime.server.server_options import ServerOptions

    return _taken(options, fields_of(ServerOptions))


def sampled(options: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    """Return `defaults` with the sampling parameters among a command's keyword arguments.

    Raises:
        InvalidParameter: a value is outside its range.
    """
    from radixlm.runtime import SamplingParams
    from radixlm.runtime.fields import fields_of

    return dataclasses.replace(defaults, **_taken(options, fields_of(SamplingParams)))


def _taken(options: dict[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    taken = {name: options.pop(name) for name in fields if name in options}
    return {name: value for name, value in taken.items() if value not in (None, ())}


def _fields() -> Mapping[str, Field]:
    """Return the declarations of all options of server, engine and sampling, by name."""
    from radixlm.runtime.engine.engine_options import EngineOptions
    from radixlm.runtime.engine.sampling_params import SamplingParams
    from radixlm.runtime.fields import fields_of
    from radixlm.runtime.server.server_options import ServerOptions

    return {**fields_of(ServerOptions), **fields_of(EngineOptions), **fields_of(SamplingParams)}


def _flag_of(field: Field) -> str:
    return field.name if field.about.flag is None else field.about.flag.name


def _option(field: Field, is_required: bool) -> click.Option:
    """Return the flag of a field."""
    flag = field.about.flag
    assert flag is not None
    if field.kind is bool:
        off = f"--no-{flag.name[2:]}" if flag.off is None else flag.off
        return click.Option(
            [f"{flag.name}/{off}" if off else flag.name, field.name],
            is_flag=True,
            default=field.default,
            show_default=bool(off) and field.about.unset is None,
            help=_for_help(field.about.doc) + (_default(field) if field.about.unset is not None else ""),
        )
    unit = flag.unit or (None, 1)
    return click.Option(
        [flag.name, field.name],
        type=_type(field),
        multiple=field.kind in _TEXTS or field.kind == _NAMED_PATHS,
        default=flag.default,
        required=is_required,
        metavar=flag.metavar or unit[0],
        callback=partial(_converted, field),
        help=_for_help(field.about.doc, field.choices) + _default(field),
    )


def _type(field: Field) -> click.ParamType[Any]:
    """Return the type by which click parses the flag of a field."""
    flag = field.about.flag
    assert flag is not None
    if field.choices:
        return click.Choice(field.choices)
    if flag.path in ("file", "directory"):
        return click.Path(file_okay=flag.path == "file", dir_okay=flag.path == "directory")
    if flag.path == "model" or field.kind is str or field.kind in _TEXTS or field.kind == _NAMED_PATHS:
        return click.STRING
    if field.kind in (int, float):
        return click.INT if field.kind is int and flag.unit is None else click.FLOAT
    return JSONObject()


def _converted(field: Field, ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Convert a flag's value to the unit of its field, and check it.

    Raises:
        ArtifactNotFound: there is no such model.
        ValueError: the value is empty, or outside the field's range.
    """
    flag = field.about.flag
    assert flag is not None
    if value == "" or (isinstance(value, tuple) and "" in value):
        raise ValueError(f"{flag.name} is empty; give a {flag.path or 'value'}, or remove it")
    if field.kind == _NAMED_PATHS:
        return _named_paths(flag.name, value)
    if flag.path == "model" and value is not None:
        from radixlm.runtime.artifact.compiled_models import artifact_named

        artifact_named(value)  # raises if it does not exist, before another model is loaded
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    own = value if flag.unit is None else value * flag.unit[1]
    if not -math.inf < own < math.inf:  # false for NaN, too
        raise ValueError(f"{flag.name} is {value}; it must be a number" + (f" of {flag.unit[0]}" if flag.unit else ""))
    own = own if flag.unit is None else int(own)
    if not field.about.holds(own):
        called = field.valid_values if flag.unit is None else f"a number of {flag.unit[0]} {field.about.range}"
        raise ValueError(f"{flag.name} is {value!r:.60}; it must be {called}")
    return own


def _named_paths(flag: str, given: Sequence[str]) -> Mapping[str, str] | None:
    """Return the paths of NAME=PATH by name; None if there are none.

    Raises:
        ValueError: a name or a path is missing, or two have a name in common.
    """
    pairs = [each.partition("=") for each in given]
    for each, (name, _, path) in zip(given, pairs, strict=True):
        if not name or not path:
            raise ValueError(f"{flag} is {each!r:.200}; give NAME=PATH")
    named = {name: path for name, _, path in pairs}
    if len(named) < len(pairs):
        names = ", ".join(name for name, _, _ in pairs)
        raise ValueError(f"{flag} is given twice with one name, of {names}; rename one")
    return named or None


def _default(field: Field) -> str:
    """Return the default and range of a flag for the help, in brackets."""
    flag = field.about.flag
    assert flag is not None
    parts = [_default_value(field)]
    if field.kind in (int, float) and flag.unit is None:  # ranges are in the field's own unit
        parts.append(field.about.range.removeprefix("of "))
    written = "; ".join(filter(None, parts))
    return f"  [{written}]" if written else ""


def _default_value(field: Field) -> str:
    """Return the text of a field's default for `--help`; empty if there is nothing to say."""
    flag, value = field.about.flag, field.default
    assert flag is not None
    if flag.default is not None:
        value = flag.default
    elif flag.unit is not None and value is not None:
        value /= flag.unit[1]
    if field.about.unset is not None and (value is None or not field.is_optional):
        return f"default: {_for_help(field.about.unset)}"
    if value in (None, ()):
        return "" if value is None else "repeatable"
    return f"default: {value}" if isinstance(value, str) else f"default: {value:g}"


def _for_help(text: str, choices: Sequence[str] = ()) -> str:
    """Return documentation for the help: flags in place of field names, except choices, and no backticks."""
    fields = _fields()
    return re.sub(
        "`(.+?)`",
        lambda found: _flag_of(fields[found[1]]) if found[1] in fields and found[1] not in choices else found[1],
        text,
    )


F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class CompileOptions:
    """Options to compile a model that is not an artifact; None is the compiler's default."""

    quantize: str | None
    kv_dtype: str | None

    @property
    def given(self) -> dict[str, str]:
        """The options of `radixlm compile` that were given, by name."""
        options = {"quantize": self.quantize, "kv-dtype": self.kv_dtype}
        return {name: value for name, value in options.items() if value is not None}

    def artifact_of(
        self,
        model: str,
        say: Callable[[str], None] | None = None,
        meanwhile: AbstractContextManager[None] | None = None,
        *,
        written: Callable[[Path], None] | None = None,
        progressed: Callable[[str, float], None] | None = None,
        kept: Callable[[str], None] | None = None,
        on_disk: bool = False,
        for_chat: bool = False,
        loras: Mapping[str, str] | None = None,
    ) -> Path:
        """Return the artifact of `model`, as `cached_artifact.artifact_of` does.

        What is compiled now gets room for the adapters `loras`.

        Raises:
            InvalidAdapter: an adapter of a model that is not compiled yet cannot be read.
        """
        from .cached_artifact import artifact_of

        return artifact_of(
            model,
            self.given | _room_for(model, loras or {}),
            say,
            meanwhile,
            written=written,
            progressed=progressed,
            kept=kept,
            on_disk=on_disk,
            for_chat=for_chat,
        )


def _room_for(model: str, loras: Mapping[str, str]) -> dict[str, str]:
    """Return the options of `radixlm compile` that give a model room for adapters; empty for an artifact."""
    from radixlm.runtime.artifact.compiled_models import artifact_named

    if not loras or artifact_named(model) is not None:
        return {}
    from radixlm.runtime.lora.adapter_files import read_adapter

    rank = max(read_adapter(path).rank for path in loras.values())
    return {"max-loras": str(max(_LEAST_LORAS, len(loras))), "max-lora-rank": str(max(_LEAST_RANK, rank))}


def compile_options(function: F) -> F:
    """Add the fields of `CompileOptions` as options; the function gets them as keyword arguments."""
    for option in (
        click.option(
            "--kv-dtype",
            type=click.Choice(["auto", "f16", "f32", "k12v8"]),
            help="Data type of the KV cache, if MODEL is not compiled yet.  [default: auto]",
        ),
        click.option(
            "--quantize",
            type=click.Choice(["keep", "q4", "q8", "f16", "f32"]),
            help="Quantization of the weights, if MODEL is not compiled yet.  [default: keep]",
        ),
    ):
        function = option(function)
    return function


T = TypeVar("T", bound="DataclassInstance")


def take(kind: type[T], options: dict[str, Any]) -> T:
    """Remove the fields of a dataclass from a command's keyword arguments, and return an instance."""
    return kind(**{field.name: options.pop(field.name) for field in dataclasses.fields(kind)})
