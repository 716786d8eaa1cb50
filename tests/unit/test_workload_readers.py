"""Trace files: every format, and every mistake with its line and its fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distserve_planner.workload import Trace, TraceError
from distserve_planner.workload.readers import read_trace

VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,10,3\n1.0,20,4\n2.5,30,5\n"


def write(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def rows(trace: Trace) -> list[tuple[float, int, int]]:
    columns = (trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist())
    return list(zip(*columns, strict=True))


def test_vidur(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, VIDUR))
    assert rows(trace) == [(0.5, 10, 3), (1.0, 20, 4), (2.5, 30, 5)]
    assert trace.rate_rps == 1.0
    assert trace.name == "trace"


def test_lengths_only(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "num_prefill_tokens,num_decode_tokens\n7,2\n8,3\n"))
    assert rows(trace) == [(0.0, 7, 2), (0.0, 8, 3)]
    with pytest.raises(TraceError, match="--rate"):
        _ = trace.rate_rps


def test_azure_dates_count_from_the_first(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,3180,8\n"
        "2023-11-16 18:18:03.9799600,110,27\n"
    )
    trace = read_trace(write(tmp_path, text))
    assert trace.arrival_s.tolist() == pytest.approx([0.0, 0.052, 60.0], abs=1e-6)
    assert trace.input_tokens.tolist() == [4808, 3180, 110]


def test_azure_2024_dates_with_zone(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01.009930+00:00,2399,6\n"
    )
    assert read_trace(write(tmp_path, text)).duration_s == pytest.approx(1.0, abs=1e-6)


def test_mooncake(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]},
        {"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46]},
    ]
    trace = read_trace(write(tmp_path, "\n".join(map(json.dumps, lines)), "m.jsonl"))
    assert rows(trace) == [(27.482, 6955, 52), (30.535, 6472, 26)]


def test_own_request_log_leaves_failed_requests_out(tmp_path: Path) -> None:
    lines = [
        {"schema": "request_log/1"},
        {"arrived_at_s": 0.1, "input_tokens": 5, "output_tokens": 6, "outcome": "finished", "ttft_s": 0.2},
        {"arrived_at_s": 0.2, "input_tokens": 5, "output_tokens": 0, "outcome": "failed"},
        {"arrived_at_s": 0.3, "input_tokens": 7, "output_tokens": 8, "outcome": "finished"},
    ]
    trace = read_trace(write(tmp_path, "\n".join(map(json.dumps, lines)), "log.jsonl"))
    assert rows(trace) == [(0.1, 5, 6), (0.3, 7, 8)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty trace"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n", "empty trace"),
        (VIDUR.replace("1.0,20,4", "1.0,0,4"), r"line 3: input_tokens=0: .*--drop-invalid"),
        (VIDUR.replace("1.0,20,4", "1.0,20,0"), r"line 3: output_tokens=0: .*--drop-invalid"),
        (VIDUR.replace("0.5,10", "-0.5,10"), r"line 2: arrival time -0.5 s: must be 0 or later"),
        (VIDUR.replace("2.5,30", "0.7,30"), r"line 4: arrives at 0.7 s, before .*\(1 s\).*--sort"),
        (VIDUR.replace("1.0,20", "1.0,many"), r"line 3: num_prefill_tokens='many': a number"),
        (VIDUR.replace("1.0,20,4", "1.0,20"), r"line 3: num_decode_tokens=None: a number"),
        (VIDUR.replace("2.5,", "nan,"), r"line 4: arrival time nan s"),
        ("when,in,out\n1,2,3\n", "header 'when,in,out' is not known; one of: arrived_at,"),
        ('{"in": 3}\n', r"line 1: keys \['in'\] are not known"),
        ('{"schema": "request_log/9"}\n', "schema='request_log/9'"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3}\n{oops\n', "line 2: not JSON"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2: TIMESTAMP='yesterday'"),
    ],
)
def test_mistakes_name_line_and_fix(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, text))


def test_the_named_fixes_work(tmp_path: Path) -> None:
    text = VIDUR.replace("2.5,30", "0.7,30").replace("1.0,20,4", "1.0,0,4")
    assert rows(read_trace(write(tmp_path, text), sort=True, drop_invalid=True)) == [
        (0.5, 10, 3),
        (0.7, 30, 5),
    ]
    with pytest.raises(TraceError, match="empty trace"):
        read_trace(write(tmp_path, VIDUR.splitlines()[0] + "\n-1,0,0\n"), drop_invalid=True)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.csv")
