"""How `radixlm serve` writes its log: lines for people, or one JSON object a line.

Knows formats, not what is logged.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any


class JSONFormatter(logging.Formatter):
    """A record as one JSON object; what it has as `fields` stands beside the time, in place of the message.

    >>> record = logging.makeLogRecord({"levelname": "INFO", "name": "x", "created": 0.0, "fields": {"id": "req-1"}})
    >>> JSONFormatter().format(record)
    '{"time": "1970-01-01T00:00:00.000Z", "level": "info", "logger": "x", "id": "req-1"}'
    """

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        second, rest = divmod(record.created, 1)
        said: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)) + f".{int(rest * 1000):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        said |= fields if isinstance(fields, dict) else {"message": record.getMessage()}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False, default=str)


def log_config(log_format: str) -> dict[str, Any]:
    """A configuration for `logging`: everything from level info on, to stderr, as `text` or `json`."""
    text = {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"default": {"()": JSONFormatter} if log_format == "json" else text},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "default"}},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        "loggers": {name: {"level": "INFO"} for name in ("radixlm", "uvicorn")},
    }
