"""A line of JSON per request that is over, as `planner workload` reads it (`schema: request_log/1`)."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from distserve.core.parsing import ConfigError

SCHEMA = "request_log/1"
STAGES = ("prefill_queue", "prefill", "decode_queue", "transfer", "decode")
_LOG = logging.getLogger(__name__)
_HEADER = json.dumps({"schema": SCHEMA}) + "\n"
_MAX_WAITING = 8192
_CLOSE_S = 5.0


def log_entry(
    arrived_at_s: float,
    input_tokens: int,
    output_tokens: int,
    times: Mapping[str, float],
    error: str | None,
    id: str,
    client_id: str,
) -> dict[str, Any]:
    """One line. `arrived_at_s` is Unix time; `times` is `StageTimes.summary`, empty for a refused request.

    An outcome other than "finished" says that nobody knows how long the answer would have been.
    """
    entry: dict[str, Any] = {
        "arrived_at_s": round(arrived_at_s, 6),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "outcome": "finished" if error is None else "failed",
    }
    if error is None:
        entry |= {key: round(times[key], 6) for key in ("ttft_s", "tpot_s")}
    else:
        entry["error"] = error
    if times:
        entry["stages_s"] = {stage: round(times[f"{stage}_s"], 6) for stage in STAGES}
    entry |= {key: value for key, value in (("id", id), ("client_id", client_id)) if value}
    return entry


class RequestLog:
    """Writes in a thread of its own. A file that would get longer than `max_bytes` becomes ``<path>.1``, that
    one ``.2`` and so on, up to `files` of them; every file has the schema in its first line.

    When the disk is slower than the requests, or full, entries are dropped and counted.
    Raises `ConfigError` if the file can't be written.
    """

    def __init__(self, path: Path, max_bytes: int, files: int) -> None:
        self.dropped = 0
        self._path, self._max_bytes, self._files = path, max_bytes, files
        self._waiting: queue.Queue[str | None] = queue.Queue(_MAX_WAITING)
        self._failing = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] | None = self._open()
        except OSError as error:
            raise ConfigError(f"request_log={str(path)!r}: {error.strerror}") from None
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def write(self, entry: Mapping[str, Any]) -> None:
        """Never blocks."""
        try:
            self._waiting.put_nowait(json.dumps(entry) + "\n")
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Writes what waits, and ends the thread."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            try:
                self._write(line)
                self._failing = False
            except OSError as error:
                self.dropped += 1
                if not self._failing:  # once, not for every request
                    _LOG.error("request log %s: %s", self._path, error)
                self._failing = True
        if self._file is not None:
            self._file.close()

    def _write(self, line: str) -> None:
        if self._file is None:
            self._file = self._open()
        if self._file.tell() > len(_HEADER) and self._file.tell() + len(line) > self._max_bytes:
            self._rotate()
            self._file = self._open()
        self._file.write(line)
        if self._waiting.empty():
            self._file.flush()

    def _open(self) -> IO[str]:
        file = self._path.open("a", encoding="ascii")
        if not file.tell():
            file.write(_HEADER)
            file.flush()
        return file

    def _rotate(self) -> None:
        assert self._file is not None
        file, self._file = self._file, None
        file.close()
        for number in range(self._files - 1, 0, -1):
            source = self._numbered(number - 1)
            if source.exists():
                source.replace(self._numbered(number))
        if self._files == 1:
            self._path.unlink()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path
