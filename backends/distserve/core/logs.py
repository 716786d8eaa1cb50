"""One line of log per record, as text or as JSON: in the stubs, in engines and in their ranks."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any

from distserve.core.config import LogFormat

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """``{"time", "level", "logger", "instance", "message", ...}``, and what a record has in `extra`.

    ``time`` is UTC, RFC 3339 with milliseconds. `extra` keys in use: ``request`` (the orchestrator's id; at
    instances followed by the attempt), ``client_id`` (the client's own), ``code``.
    """

    def __init__(self, instance: str) -> None:
        super().__init__()
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        fields: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "instance": self._instance,
            "message": record.getMessage(),
            **{key: value for key, value in vars(record).items() if key not in _STANDARD},
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def formatter(log_format: LogFormat, instance: str) -> logging.Formatter:
    """What a process of `instance` formats its records with."""
    if log_format == "json":
        return JsonFormatter(instance)
    return logging.Formatter(f"%(asctime)s {instance} %(levelname)s %(name)s: %(message)s")


def log_to_stderr(log_format: LogFormat, instance: str, level: int = logging.INFO) -> None:
    """Of a process that is ours alone: all loggers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(log_format, instance))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def log_package_to_stderr(log_format: LogFormat, instance: str, level: int = logging.INFO) -> None:
    """In a process of Triton's, the stub: what `distserve` logs, and nothing else.

    The stub's stderr is the server's log. Triton's own logger is left alone: it sends every line through
    shared memory that the answer to `initialize` is on its way through, too.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(log_format, instance))
    logger = logging.getLogger("distserve")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
