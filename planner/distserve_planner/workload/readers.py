"""Readers of the trace formats in use, told apart by their header or keys.

* CSV `arrived_at,num_prefill_tokens,num_decode_tokens` (Vidur, Sarathi-Serve); `arrived_at` may be missing
* CSV `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure LLM inference traces)
* JSON lines `timestamp` (ms), `input_length`, `output_length` (Mooncake)
* JSON lines with a first line `{"schema": "request_log/1", ...}`, then `arrived_at_s`, `input_tokens`,
  `output_tokens` in every line (this project's request log). A server writes a line when a request ends, so
  they are put in order of arrival. Requests whose `outcome` is "failed" are left out: how long their answers
  would have been is not known
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distserve_planner.workload.trace import Trace, TraceError, check_rows

REQUEST_LOG_SCHEMA = "request_log/1"


class Row(NamedTuple):
    line: int
    arrival: float  # seconds; from any origin if the format's clock is absolute
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Format:
    """One trace format: its three columns, and how a time cell becomes seconds."""

    name: str
    time: str
    inputs: str
    outputs: str
    seconds: Callable[[Any], float]
    absolute: bool = False  # times are dates: counted from the first row


def _number(value: Any) -> float:
    return float(value)


def _milliseconds(value: Any) -> float:
    return float(value) / 1000


def _date(value: Any) -> float:
    text = str(value).strip().replace(" ", "T").split("+")[0].rstrip("Z")
    return float(np.datetime64(text, "ns").astype(np.int64)) / 1e9


CSV_FORMATS = (
    Format("vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens", _number),
    Format("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _date, absolute=True),
)
JSONL_FORMATS = (
    Format("mooncake", "timestamp", "input_length", "output_length", _milliseconds),
    Format("request_log", "arrived_at_s", "input_tokens", "output_tokens", _number),
)


def read_trace(path: str | Path, *, sort: bool = False, drop_invalid: bool = False) -> Trace:
    """Reads a trace file; the format is told by its first line.

    sort: rows are put in order of arrival; otherwise a row that arrives before the one above is refused.
    drop_invalid: rows with lengths below 1 or times below 0 are left out; otherwise they are refused.
    Raises `TraceError` naming the file, the line and the fix.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    first = next((line for line in lines if line.strip()), "")
    if not first:
        raise TraceError(f"{path}: empty trace; at least one request is needed")
    timed, rows = (
        _json_rows(lines, str(path)) if first.lstrip().startswith("{") else _csv_rows(lines, str(path))
    )
    sort = sort or REQUEST_LOG_SCHEMA in first
    if drop_invalid:
        rows = [r for r in rows if r.input_tokens >= 1 and r.output_tokens >= 1 and r.arrival >= 0]
    if sort:
        rows.sort(key=lambda r: r.arrival)
    return _trace(rows, Path(path).stem, str(path), timed)


def _trace(rows: list[Row], name: str, where: str, timed: bool) -> Trace:
    times = np.array([r.arrival for r in rows], dtype=np.float64)
    inputs = np.array([r.input_tokens for r in rows], dtype=np.int64)
    outputs = np.array([r.output_tokens for r in rows], dtype=np.int64)
    check_rows(times, inputs, outputs, where, np.array([r.line for r in rows], dtype=np.int64))
    return Trace(times, inputs, outputs, name, timed)


def _csv_rows(lines: list[str], where: str) -> tuple[bool, list[Row]]:
    reader = csv.DictReader(lines)
    columns = [name.strip() for name in reader.fieldnames or []]
    reader.fieldnames = columns
    found = next((f for f in CSV_FORMATS if f.inputs in columns and f.outputs in columns), None)
    if found is None:
        known = "; ".join(f"{f.time},{f.inputs},{f.outputs}" for f in CSV_FORMATS)
        raise TraceError(f"{where}: header {','.join(columns)!r} is not known; one of: {known}")
    numbered = ((reader.line_num, row) for row in reader)
    return found.time in columns, list(_rows(numbered, found, where))


def _json_rows(lines: list[str], where: str) -> tuple[bool, list[Row]]:
    records = [(number, _json(line, number, where)) for number, line in enumerate(lines, 1) if line.strip()]
    head = records[0][1]
    if "schema" in head:
        if head["schema"] != REQUEST_LOG_SCHEMA:
            raise TraceError(f"{where}: schema={head['schema']!r}; this reader needs {REQUEST_LOG_SCHEMA!r}")
        found = JSONL_FORMATS[1]
        records = [r for r in records if "schema" not in r[1] and r[1].get("outcome") != "failed"]
    else:
        matches = [f for f in JSONL_FORMATS if f.inputs in head and f.outputs in head]
        if not matches:
            known = "; ".join(f"{f.time}, {f.inputs}, {f.outputs}" for f in JSONL_FORMATS)
            raise TraceError(f"{where}: line 1: keys {sorted(head)} are not known; one of: {known}")
        found = matches[0]
    return True, list(_rows(iter(records), found, where))


def _json(line: str, number: int, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: line {number}: not JSON ({error.msg})") from None
    if not isinstance(record, dict):
        raise TraceError(f"{where}: line {number}: expected an object, found {type(record).__name__}")
    return record


def _rows(records: Iterator[tuple[int, Mapping[str, Any]]], form: Format, where: str) -> Iterator[Row]:
    origin = None
    for line, record in records:
        arrival = _cell(record, form.time, form.seconds, line, where) if form.time in record else 0.0
        if form.absolute:
            origin = arrival if origin is None else origin
            arrival -= origin
        inputs = _cell(record, form.inputs, _number, line, where)
        outputs = _cell(record, form.outputs, _number, line, where)
        yield Row(line, arrival, int(inputs), int(outputs))


def _cell(
    record: Mapping[str, Any], key: str, convert: Callable[[Any], float], line: int, where: str
) -> float:
    value = record.get(key)
    try:
        return convert(value)
    except (TypeError, ValueError):
        raise TraceError(f"{where}: line {line}: {key}={value!r}: a number is needed") from None
