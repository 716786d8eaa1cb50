"""What a request log tells of the past: arrivals, lengths, queueing, objectives met."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distserve_planner.slo import Slo
from distserve_planner.workload.readers import REQUEST_LOG_SCHEMA
from distserve_planner.workload.trace import Trace, TraceError

Floats = NDArray[np.float64]

_QUEUES = ("prefill_queue", "decode_queue")


@dataclass(frozen=True, eq=False)
class History:
    """Requests in order of arrival, all arrays of one length n.

    arrival_s: seconds, from the log's origin. input_tokens, output_tokens: int64; output 0 where a request
    failed. queue_s: waiting for prefill and for decode; NaN where the log does not say. met: both objectives.
    """

    arrival_s: Floats
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    queue_s: Floats
    met: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.arrival_s)

    @classmethod
    def empty(cls) -> History:
        ints = np.zeros(0, np.int64)
        return cls(np.zeros(0), ints, ints, np.zeros(0), np.zeros(0, bool))

    def between(self, start_s: float, end_s: float) -> History:
        """Requests that arrived from `start_s` to before `end_s`."""
        first, last = np.searchsorted(self.arrival_s, [start_s, end_s])
        return self.take(slice(int(first), int(last)))

    def take(self, index: slice | NDArray[np.int64]) -> History:
        return History(
            self.arrival_s[index],
            self.input_tokens[index],
            self.output_tokens[index],
            self.queue_s[index],
            self.met[index],
        )

    def followed_by(self, other: History) -> History:
        """Both, put in order of arrival: a log has its requests in the order of their ends."""
        joined = History(
            np.concatenate([self.arrival_s, other.arrival_s]),
            np.concatenate([self.input_tokens, other.input_tokens]),
            np.concatenate([self.output_tokens, other.output_tokens]),
            np.concatenate([self.queue_s, other.queue_s]),
            np.concatenate([self.met, other.met]),
        )
        if len(self) and len(other) and other.arrival_s.min() < self.arrival_s[-1]:
            return joined.take(np.argsort(joined.arrival_s, kind="stable"))
        return joined

    @property
    def served(self) -> History:
        """Requests whose answers came, so that their lengths are known."""
        return self.take(np.flatnonzero(self.output_tokens > 0))

    def trace(self, name: str = "recent") -> Trace:
        """For fitting. Raises `TraceError` if nothing was served."""
        served = self.served
        if not len(served):
            raise TraceError(f"{name}: no request was served")
        return Trace(served.arrival_s - served.arrival_s[0], served.input_tokens, served.output_tokens, name)


@dataclass(frozen=True)
class Profile:
    """A window in numbers. Rates per second; `cv` of the gaps; NaN where there is nothing to tell from."""

    start_s: float
    end_s: float
    requests: int
    rate_rps: float
    gap_cv: float
    mean_input: float
    mean_output: float
    correlation: float  # of the lengths' logarithms
    attainment: float
    mean_queue_s: float


def profile(history: History, start_s: float, end_s: float) -> Profile:
    """The window from `start_s` to `end_s`."""
    part = history.between(start_s, end_s)
    served, gaps = part.served, np.diff(part.arrival_s)
    nan = float("nan")
    known = part.queue_s[~np.isnan(part.queue_s)]
    logs = np.log([served.input_tokens + 1.0, served.output_tokens + 1.0])
    varied = len(served) > 2 and bool((logs.std(axis=1) > 0).all())
    return Profile(
        start_s,
        end_s,
        len(part),
        len(part) / (end_s - start_s),
        float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else nan,
        float(served.input_tokens.mean()) if len(served) else nan,
        float(served.output_tokens.mean()) if len(served) else nan,
        float(np.corrcoef(logs)[0, 1]) if varied else nan,
        float(part.met.mean()) if len(part) else nan,
        float(known.mean()) if len(known) else nan,
    )


class LogTail:
    """Reads what a request log has gained since the last look. A line that is still being written waits."""

    def __init__(self, path: Path, slo: Slo) -> None:
        self._path, self._slo = path, slo
        self._offset = 0
        self._inode = -1
        self._rest = b""
        self.end_s = 0.0  # of the latest request that has ended

    def read(self) -> History:
        """Only what is new. A file that was replaced or cut is read from its beginning.

        Raises `TraceError` naming file and entry, `OSError`-free: a log that is not there yet is empty.
        """
        try:
            with self._path.open("rb") as file:
                found = self._path.stat()
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset, self._rest = found.st_ino, 0, b""
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return History.empty()
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return self._history(line for line in lines if line.strip())

    def _history(self, lines: Iterable[bytes]) -> History:
        rows = []
        for line in lines:
            try:
                record = json.loads(line)
                if "schema" in record:
                    if record["schema"] != REQUEST_LOG_SCHEMA:
                        raise ValueError(f"schema={record['schema']!r}, not {REQUEST_LOG_SCHEMA!r}")
                    continue
                rows.append(self._row(record))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                text = line[:80].decode(errors="replace")
                raise TraceError(f"{self._path}: {text!r}: {error}") from None
        rows.sort()
        if not rows:
            return History.empty()
        arrival, inputs, outputs, queue, met = zip(*rows, strict=True)
        return History(
            np.array(arrival, np.float64),
            np.array(inputs, np.int64),
            np.array(outputs, np.int64),
            np.array(queue, np.float64),
            np.array(met, bool),
        )

    def _row(self, record: Mapping[str, Any]) -> tuple[float, int, int, float, bool]:
        arrived, inputs = float(record["arrived_at_s"]), int(record["input_tokens"])
        stages = record.get("stages_s") or {}
        queue = sum(float(stages[s]) for s in _QUEUES if s in stages) if stages else float("nan")
        if record.get("outcome") == "failed":
            self.end_s = max(self.end_s, arrived)
            return arrived, inputs, 0, queue, False
        outputs = int(record["output_tokens"])
        ttft, tpot = float(record.get("ttft_s", 0.0)), float(record.get("tpot_s", 0.0))
        self.end_s = max(self.end_s, arrived + ttft + tpot * max(0, outputs - 1))
        return arrived, inputs, outputs, queue, ttft <= self._slo.ttft_s and tpot <= self._slo.tpot_s


def shifted(history: History, by_s: float) -> History:
    """The same requests, `by_s` later."""
    return replace(history, arrival_s=history.arrival_s + by_s)
