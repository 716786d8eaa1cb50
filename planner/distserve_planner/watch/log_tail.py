"""Follows a request log that a server is writing, over the files that it puts aside."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import IO

import numpy as np

from distserve_planner.slo import Slo
from distserve_planner.watch.history import History
from distserve_planner.workload.readers import REQUEST_LOG_SCHEMA
from distserve_planner.workload.trace import TraceError

_QUEUES = ("prefill_queue", "decode_queue")
Row = tuple[float, int, int, float, float]


class LogTail:
    """Reads what a log has gained since the last look; a line that is still being written waits.

    A file that was put aside meanwhile (`<path>.1`, then `.2`, ...) is read to its end first. A context
    manager.
    """

    def __init__(self, path: Path, slo: Slo) -> None:
        self._path, self._slo = path, slo
        self._file: IO[bytes] | None = None
        self._rest = b""
        self.end_s = 0.0  # of the latest request that has ended, by the log's clock

    def __enter__(self) -> LogTail:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def read(self) -> History:
        """Only what is new. A file that was replaced or cut is read from its beginning; a log that is not
        there yet is empty. Raises `TraceError` naming file and entry.
        """
        rows: list[Row] = []
        if self._file is None:
            self._open(self._path)
        while self._file is not None:
            after = self._put_aside(self._file)  # asked first: nothing is written to such a file any more
            rows += self._new_rows(self._file)
            if after is None:
                break
            self._open(after)
        return _history(rows)

    def _open(self, path: Path) -> None:
        self._close()
        with contextlib.suppress(FileNotFoundError):  # between two files; the next look finds it
            self._file = path.open("rb")

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""

    def _put_aside(self, file: IO[bytes]) -> Path | None:
        """The file that followed this one; None while this one is being written."""
        numbers = [p.suffix[1:] for p in self._path.parent.glob(f"{self._path.name}.*")]
        older = sorted(int(n) for n in numbers if n.isdigit())
        files = [self._path, *(self._path.with_name(f"{self._path.name}.{n}") for n in older)]
        mine = os.fstat(file.fileno()).st_ino
        inodes = [_inode(path) for path in files]
        if mine not in inodes:
            return self._path
        index = inodes.index(mine)
        return files[index - 1] if index else None

    def _new_rows(self, file: IO[bytes]) -> list[Row]:
        if os.fstat(file.fileno()).st_size < file.tell():
            file.seek(0)
            self._rest = b""
        *lines, self._rest = (self._rest + file.read()).split(b"\n")
        rows = (self._row(line) for line in lines if line.strip())
        return [row for row in rows if row is not None]

    def _row(self, line: bytes) -> Row | None:
        try:
            return self._parsed(line)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            text = line[:80].decode(errors="replace")
            raise TraceError(f"{self._path}: {text!r}: {error}") from None

    def _parsed(self, line: bytes) -> Row | None:
        record = json.loads(line)
        if "schema" in record:
            if record["schema"] != REQUEST_LOG_SCHEMA:
                raise ValueError(f"schema={record['schema']!r}, not {REQUEST_LOG_SCHEMA!r}")
            return None
        arrived, inputs = float(record["arrived_at_s"]), int(record["input_tokens"])
        stages = record.get("stages_s") or {}
        queue = sum(float(stages[s]) for s in _QUEUES if s in stages) if stages else float("nan")
        if record.get("outcome") == "failed":
            self.end_s = max(self.end_s, arrived)
            code = str(record.get("error", "")).partition(":")[0]
            if code == "INVALID_ARGUMENT":
                return None  # nothing was asked of the instances
            return arrived, inputs, 0, queue, float("nan") if code == "CANCELLED" else 0.0
        outputs = int(record["output_tokens"])
        ttft, tpot = float(record.get("ttft_s", 0.0)), float(record.get("tpot_s", 0.0))
        self.end_s = max(self.end_s, arrived + ttft + tpot * max(0, outputs - 1))
        met = ttft <= self._slo.ttft_s and tpot <= self._slo.tpot_s
        return arrived, inputs, outputs, queue, float(met)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _history(rows: list[Row]) -> History:
    rows.sort()
    if not rows:
        return History.empty()
    arrival, inputs, outputs, queue, met = zip(*rows, strict=True)
    return History(
        np.array(arrival, np.float64),
        np.array(inputs, np.int64),
        np.array(outputs, np.int64),
        np.array(queue, np.float64),
        np.array(met, np.float64),
    )
