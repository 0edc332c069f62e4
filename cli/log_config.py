"""Configure the log of `radixlm serve`: lines of text, or one JSON object per line, the command's errors included.

Knows click, logging and formats, not what the command does. With JSON, every line on stderr is JSON.
"""

from __future__ import annotations

import json
import logging
import logging.config
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn

import click

_OPTION = "--log-format"
_log = logging.getLogger("radixlm.serve")


class OurNames(logging.Filter):
    """A log filter that renames uvicorn's loggers, because `uvicorn.error` looks alarming for normal messages.

    >>> record = logging.makeLogRecord({"name": "uvicorn.error"})
    >>> OurNames().filter(record), record.name
    (True, 'radixlm.http')
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Rename the record. Always returns True."""
        if record.name.startswith("uvicorn"):
            record.name = "radixlm.http"
        return True


class JSONFormatter(logging.Formatter):
    """Formats a record as one JSON object. A record's `fields`, if it has any, replace its message.

    >>> record = logging.makeLogRecord({"levelname": "INFO", "name": "x", "created": 0.0, "fields": {"id": "req-1"}})
    >>> JSONFormatter().format(record)
    '{"time": "1970-01-01T00:00:00.000Z", "level": "info", "logger": "x", "id": "req-1"}'
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        second, rest = divmod(record.created, 1)
        values: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)) + f".{int(rest * 1000):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        values |= fields if isinstance(fields, dict) else {"message": record.getMessage()}
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values, ensure_ascii=False, default=str)


def log_config(log_format: str) -> dict[str, Any]:
    """Return a configuration for `logging`: level info and above to stderr, as `text` or `json`."""
    text = {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"default": {"()": JSONFormatter} if log_format == "json" else text},
        "filters": {"ours": {"()": OurNames}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "default", "filters": ["ours"]}},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        "loggers": {name: {"level": "INFO"} for name in ("radixlm", "uvicorn")},
    }


def log_line(text: str) -> None:
    """Log a line of the command."""
    _log.info("%s", text)


def warn(text: str, log_format: str | None) -> None:
    """Print a warning, or log it as JSON."""
    if log_format == "json":
        _log.warning("%s", text)
    else:
        click.secho(f"warning: {text}", err=True)


class JSONErrors(click.Command):
    """A command with `--log-format`. With `json`, errors of the command are JSON, too."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the arguments. Errors are JSON if the arguments ask for that."""
        if not _asks_for_json(args):
            return super().make_context(info_name, args, parent, **extra)
        with _json_errors(has_traceback=False):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Errors, warnings and failures of threads are JSON with `--log-format json`."""
        if ctx.params["log_format"] != "json":
            return super().invoke(ctx)
        logging.captureWarnings(True)
        threading.excepthook = _log_thread
        with _json_errors(has_traceback=bool(ctx.find_root().params.get("debug"))):
            return super().invoke(ctx)


@contextmanager
def _json_errors(*, has_traceback: bool) -> Iterator[None]:
    """Log errors of the block as JSON, and exit with the same code as without JSON."""
    from .main import EXIT_BAD_INPUT, EXIT_INTERRUPTED, foreseen

    logging.config.dictConfig(log_config("json"))
    try:
        yield
    except click.exceptions.Exit:
        raise
    except click.ClickException as error:
        _end(error.format_message(), error.exit_code)
    except KeyboardInterrupt:
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
    except Exception as error:
        if (message := foreseen(error)) is not None:
            _end(message, EXIT_BAD_INPUT, error if has_traceback else None)
        _end("internal error", 1, error)


def _end(message: str, exit_code: int, error: Exception | None = None) -> NoReturn:
    _log.error("%s", message, exc_info=error)
    raise click.exceptions.Exit(exit_code) from None


def _log_thread(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread else "?"
    _log.error("thread %s ended", name, exc_info=args.exc_value)


def _asks_for_json(args: Sequence[str]) -> bool:
    """Return whether the arguments, valid or not, ask for a JSON log.

    >>> _asks_for_json(["a", "--log-format", "json"]), _asks_for_json(["--log-format=json"]), _asks_for_json(["json"])
    (True, True, False)
    """
    return f"{_OPTION}=json" in args or any(name == _OPTION and value == "json" for name, value in pairwise(args))
