"""Python's logging into the server's log."""

from __future__ import annotations

import logging

import triton_python_backend_utils as pb_utils


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


def log_to_triton(instance: str, level: int = logging.INFO) -> None:
    """Send what `distserve` logs to the server's log, with the model instance's name in front."""
    logger = logging.getLogger("distserve")
    logger.handlers = [TritonLogHandler(instance)]
    logger.setLevel(level)
    logger.propagate = False
