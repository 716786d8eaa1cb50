"""Python's logging into the server's log."""

from __future__ import annotations

import logging
import sys

import triton_python_backend_utils as pb_utils

from distserve.core.config import LogFormat
from distserve.core.logs import formatter


class TritonLogHandler(logging.Handler):
    """Passes records to `pb_utils.Logger`, which may be used from any thread."""

    def __init__(self, instance: str) -> None:
        super().__init__()
        self._instance = instance

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = f"{self._instance}: {record.getMessage()}"
            if record.exc_info:
                message += "\n" + logging.Formatter().formatException(record.exc_info)
            logger = pb_utils.Logger
            if record.levelno >= logging.ERROR:
                logger.log_error(message)
            elif record.levelno >= logging.WARNING:
                logger.log_warn(message)
            else:
                logger.log_info(message)
        except Exception:
            self.handleError(record)


def log_to_triton(instance: str, log_format: LogFormat = "text", level: int = logging.INFO) -> None:
    """Send what `distserve` logs to the server's log, with the model instance's name.

    JSON goes to the same place, the server's stderr, but past Triton's logger, which would put a prefix in
    front of every line.
    """
    handler: logging.Handler = TritonLogHandler(instance)
    if log_format == "json":
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(formatter(log_format, instance))
    logger = logging.getLogger("distserve")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
