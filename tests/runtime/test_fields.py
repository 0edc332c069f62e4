"""Options that are declared once are checked, documented, and on the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from radixlm.cli import field_flags
from radixlm.cli.field_flags import FieldCommand
from radixlm.runtime.engine.engine_options import EngineOptions
from radixlm.runtime.engine.request_options import RequestOptions
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.fields import Flag, check_fields, check_needs, documented, fields_of, given_of, option

NUMBERS = st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=3), st.none())


@documented
@dataclass(frozen=True)
class Oven:
    """An oven."""

    watts: int | None = option(
        None, "How hot.", unset="as hot as it gets", above=0, flag=Flag("--kilowatts", "heat", unit=("kW", 1e3))
    )
    share: float = option(0.5, "Of `watts`.", low=0, high=1, flag=Flag("--share", "heat"))
    mode: Literal["grill", "light"] = option("light", "`light`: see `share`.", flag=Flag("--mode", "heat"))
    minutes: int = option(9, "Until it rings.", low=1, needs="watts", flag=Flag("--minutes", "time", default=7))
    seconds: int | None = option(None, "Beside `minutes`.", low=0, needs="watts")
    light: bool = option(True, "Whether one sees it.", flag=Flag("--light", "other"))
    racks: tuple[str, ...] = option((), "Names.", most=2, longest=4, flag=Flag("--rack", "other"))

    def __post_init__(self) -> None:
        check_fields(self)
        check_needs(fields_of(Oven), given_of(self))


@pytest.mark.parametrize("options", [EngineOptions, SamplingParams, Oven])
@given(value=NUMBERS)
def test_a_number_is_refused_exactly_where_it_is_none_or_outside_its_range(options: type, value: object) -> None:
    for field in fields_of(options).values():
        if field.kind not in (int, float):
            continue
        about, is_refused = field.about, False
        try:
            field.check(value)
        except InvalidParameter as error:
            is_refused = True
            assert error.param == field.name and str(error).startswith(f"{field.name} is ")
        is_number = type(value) is int or (field.kind is float and type(value) is float)
        fits = is_number and (
            math.isfinite(value)  # type: ignore[arg-type]
            and not (about.low is not None and value < about.low)  # type: ignore[operator]
            and not (about.high is not None and value > about.high)  # type: ignore[operator]
            and not (about.above is not None and value <= about.above)  # type: ignore[operator]
        )
        assert is_refused != (fits or (value is None and field.is_optional)), (field, value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "fry"}, "mode is 'fry'; use one of grill, light"),
        ({"light": 1}, "light is 1; it must be true or false"),
        ({"share": math.nan}, "share is nan; it must be a number from 0 to 1"),
        ({"watts": 0}, "watts is 0; it must be an integer above 0"),
        ({"seconds": 3}, "seconds is given and watts is not; give both, or leave seconds out"),
        ({"racks": ("a", "b", "c")}, "racks has 3 entries; at most 2 are allowed"),
        ({"racks": ("upper",)}, "racks has 'upper'; each must be a string of 1 to 4 characters"),
        ({"racks": 7}, "racks is 7; it must be a text or a list of texts"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{says}$"):
        Oven(**options)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("watts", "1.5", 1500),
        ("share", "0.25", 0.25),
        ("minutes", "3", 3),
        ("light", "false", False),
        ("mode", "x", "x"),
    ],
)
def test_texts_are_read_in_the_units_of_the_flag(name: str, text: str, value: object) -> None:
    assert fields_of(Oven)[name].parsed(text) == value


@pytest.mark.parametrize("name", ["watts", "share", "minutes", "light"])
@pytest.mark.parametrize("text", ["", "many", "1e999", "no"])
def test_a_text_that_is_no_value_is_refused(name: str, text: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{name} is "):
        field = fields_of(Oven)[name]
        field.check(field.parsed(text))


def test_the_documentation_of_a_class_has_all_fields() -> None:
    assert Oven.__doc__ is not None
    assert "watts: How hot. An integer above 0. Default: None, as hot as it gets.\n" in Oven.__doc__
    assert "share: Of `watts`. A number from 0 to 1. Default: 0.5.\n" in Oven.__doc__
    assert "mode: `light`: see `share`. One of grill, light. Default: 'light'.\n" in Oven.__doc__
    for options in (EngineOptions, SamplingParams, RequestOptions):
        assert all(f"    {name}: " in str(options.__doc__) for name in fields_of(options))


def test_what_is_printed_is_one_line_that_makes_the_value_again_without_its_secrets() -> None:
    assert repr(SamplingParams(top_p=0.5, stop=["a\n", "b"])) == "SamplingParams(top_p=0.5, stop=('a\\n', 'b'))"
    assert repr(EngineOptions()) == "EngineOptions()"
    assert eval(repr(SamplingParams(seed=7, logit_bias={3: 1.5}))) == SamplingParams(seed=7, logit_bias={3: 1.5})
    assert "sk-1" not in repr(RequestOptions(client="sk-1"))


@pytest.fixture
def bake(monkeypatch: pytest.MonkeyPatch) -> click.Command:
    """A command with all flags of the oven but the light's."""
    monkeypatch.setattr(field_flags, "_fields", lambda: fields_of(Oven))

    @click.command(cls=FieldCommand, flags=("heat", "time", "racks"))
    def command(**options: Any) -> None:
        """Bake."""
        click.echo(sorted((name, value) for name, value in options.items() if value not in (None, ())))

    return command


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kilowatts", "1.5"], "[('minutes', 7), ('watts', 1500)]\n"),
        (
            ["--share", "1", "--mode", "grill", "--rack", "a", "--rack", "b", "--kilowatts", "2", "--minutes", "1"],
            "[('minutes', 1), ('mode', 'grill'), ('racks', ('a', 'b')), ('share', 1.0), ('watts', 2000)]\n",
        ),
    ],
)
def test_flags_give_fields_in_their_own_units(bake: click.Command, arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(bake, arguments)
    assert (result.exit_code, result.output) == (0, says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kilowatts", "inf"], "--kilowatts is inf; it must be a number of kW"),
        (["--kilowatts", "1e307"], "--kilowatts is 1e+307; it must be a number of kW"),
        (["--share", "2"], "--share is 2.0; it must be a number from 0 to 1"),
        (["--kilowatts", "0"], "--kilowatts is 0.0; it must be a number of kW above 0"),
        (["--minutes", "3"], "--minutes is given and --kilowatts is not; give both, or leave --minutes out"),
    ],
)
def test_flags_are_named_in_what_is_wrong(bake: click.Command, arguments: list[str], says: str) -> None:
    assert str(CliRunner().invoke(bake, arguments).exception) == says


@pytest.mark.parametrize("arguments", [["--mode", "fry"], ["--minutes", "1.5"], ["--no-light"]])
def test_a_flag_of_another_kind_or_of_no_group_of_the_command_is_refused(
    bake: click.Command, arguments: list[str]
) -> None:
    assert CliRunner().invoke(bake, arguments).exit_code == 2


def test_the_help_says_defaults_and_flags(bake: click.Command) -> None:
    said = " ".join(CliRunner().invoke(bake, ["--help"]).output.split())
    assert "--kilowatts kW How hot. [default: as hot as it gets]" in said
    assert "Of --kilowatts. [default: 0.5; from 0 to 1]" in said
    assert "--mode [grill|light] light: see --share. [default: light]" in said
    assert "Until it rings. [default: 7; 1 or more]" in said
    assert "--light" not in said


def test_each_flag_is_declared_once() -> None:
    """A command that has a flag of its own with the name of a field's would hide one of them."""
    from radixlm.cli.main import COMMANDS, cli

    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        flags = [
            flag for each in command.get_params(click.Context(command)) for flag in (*each.opts, *each.secondary_opts)
        ]
        assert len(flags) == len({*flags}), name


def test_serve_has_every_flag_of_the_engine() -> None:
    from radixlm.cli.serve import command

    given = {name for each in command.get_params(click.Context(command)) for name in each.opts}
    assert given >= {each.about.flag.name for each in fields_of(EngineOptions).values() if each.about.flag} - {
        "--idle-work"
    }
