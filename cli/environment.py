"""Set the options of a command by environment variables: errors name the variable, unknown variables are warned about.

Knows flags and variables by name, not what they do.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
from click.core import ParameterSource

from .field_flags import FieldCommand
from .help_sections import VARIABLE_PREFIX, flag_of, variable_of
from .log_config import warn

OTHER_VARIABLES = frozenset(
    VARIABLE_PREFIX + name
    for name in (
        *("KERNEL_CACHE", "COMPLETE"),
        # of the tests and benchmarks
        *("AIDER", "ARM_PYTHON", "ARTIFACT", "DATA", "DIST", "MODEL", "NPM_AGENTS", "OPENS_IN_S", "TASK"),
        *("TELL_CONNECTIONS", "TRACES", "UNPAID_GUESSES", "URL"),
    )
)
"""Known variables that belong to no option."""
# Kubernetes sets these for a service that is called radixlm; the first, which is also an option's, to a URL
_PORT = VARIABLE_PREFIX + "PORT"
_OF_A_SERVICE = re.compile(VARIABLE_PREFIX + r"(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_\w+)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


class EnvironmentCommand(FieldCommand):
    """A command whose options can all be set by environment variables."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with an environment variable for each option."""
        params = super().get_params(ctx)
        for param in params:
            if isinstance(param, click.Option) and not param.is_eager:
                variable = variable_of(flag_of(param))
                if param.envvar in (None, variable):
                    param.envvar = None if _is_of_a_service(variable) else variable
        return params

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. An error about an option that a variable sets names the variable."""
        with self._variables_named(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, after a warning for each unknown variable. Its errors name variables, too."""
        for name in self.unknown_variables(ctx):
            options = {known.removeprefix(VARIABLE_PREFIX): known for known in self._variables(ctx)}
            near = difflib.get_close_matches(name.removeprefix(VARIABLE_PREFIX), options, n=1)
            hint = f"did you mean {options[near[0]]}?" if near else f"radixlm {self.name} --help lists the options"
            warn(f"{name} is no option, and is ignored; {hint}", ctx.params.get("log_format"))
        with self._variables_named(ctx):
            return super().invoke(ctx)

    def unknown_variables(self, ctx: click.Context) -> list[str]:
        """Return the variables of the environment that look like options and are none, sorted."""
        known = {*self._variables(ctx), *OTHER_VARIABLES}
        found = (name for name in os.environ if name.startswith(VARIABLE_PREFIX) and name not in known)
        return sorted(name for name in found if not _is_of_a_service(name))

    def _declared(self, ctx: click.Context) -> Iterator[click.Option]:
        """Return the options among the parameters."""
        return (param for param in self.get_params(ctx) if isinstance(param, click.Option))

    def _variables(self, ctx: click.Context) -> list[str]:
        """Return the variables of all options."""
        return [param.envvar for param in self._declared(ctx) if isinstance(param.envvar, str)]

    @contextmanager
    def _variables_named(self, ctx: click.Context) -> Iterator[None]:
        """Replace flags in the messages of expected errors by the variables that set them."""
        try:
            yield
        except click.BadParameter as error:
            flags = self._flags_set_by_variables(ctx)
            variable = None if error.param is None else flags.get(flag_of(error.param))
            if variable is None:
                raise
            message = named_by_variables(error.message, flags)
            raise click.BadParameter(message, error.ctx, error.param, f"'{variable}'") from error
        except ValueError as error:
            if error.args:
                text = named_by_variables(str(error.args[0]), self._flags_set_by_variables(ctx))
                error.args = (text, *error.args[1:])
            raise

    def _flags_set_by_variables(self, ctx: click.Context) -> dict[str, str]:
        """Return the variables by the flags whose values they set."""
        return {
            flag: str(param.envvar)
            for param in self._declared(ctx)
            if ctx.get_parameter_source(param.name or "") is ParameterSource.ENVIRONMENT
            for flag in (*param.opts, *param.secondary_opts)
        }


def named_by_variables(text: str, variables: Mapping[str, str]) -> str:
    """Return a message with the names of variables in place of flags.

    >>> named_by_variables("--port is 1, --port-x is 2", {"--port": "RADIXLM_PORT"})
    'RADIXLM_PORT is 1, --port-x is 2'
    """
    return re.sub(r"(?<![\w-])--?[a-z][\w-]*", lambda flag: variables.get(flag[0], flag[0]), text)


def _is_of_a_service(name: str) -> bool:
    """Return whether Kubernetes set a variable, for a service that is called radixlm."""
    is_url = name == _PORT and _SERVICE_URL.match(os.environ.get(name, ""))
    return bool(is_url or _OF_A_SERVICE.fullmatch(name))
