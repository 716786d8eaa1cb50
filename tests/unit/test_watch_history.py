"""Following a request log that grows over several files, and what a window of it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distserve.serving.request_log import RequestLog
from distserve_planner.slo import Slo
from distserve_planner.watch.history import History, profile
from distserve_planner.watch.log_tail import LogTail
from distserve_planner.workload.trace import TraceError

SLO = Slo(0.5, 0.1)
HEAD = json.dumps({"schema": "request_log/1"}) + "\n"


def line(arrived: float, **more: Any) -> str:
    record = {
        "arrived_at_s": arrived, "input_tokens": 100, "output_tokens": 11, "outcome": "finished",
        "ttft_s": 0.2, "tpot_s": 0.05,
        "stages_s": {"prefill_queue": 0.1, "prefill": 0.1, "decode_queue": 0.02},
        **more,
    }  # fmt: skip
    return json.dumps(record) + "\n"


def test_only_what_is_new_and_whole_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with LogTail(path, SLO) as tail:
        assert len(tail.read()) == 0  # not there yet
        second = line(2.0, ttft_s=0.6)
        path.write_text(HEAD + line(1.0) + second[:20])
        first = tail.read()
        assert first.arrival_s.tolist() == [1.0]
        assert first.queue_s[0] == pytest.approx(0.12)
        assert first.met.tolist() == [1.0]
        with path.open("a") as file:
            file.write(second[20:] + line(1.5, outcome="failed", output_tokens=0))
        later = tail.read()
        assert later.arrival_s.tolist() == [1.5, 2.0]  # by arrival, though it ended later
        assert later.met.tolist() == [0.0, 0.0]
        assert len(later.served) == 1
        assert tail.end_s == pytest.approx(2.0 + 0.6 + 10 * 0.05)
    both = History.empty().followed_by(later).followed_by(first)
    assert both.arrival_s.tolist() == [1.0, 1.5, 2.0]
    assert both.between(1.0, 2.0).arrival_s.tolist() == [1.0, 1.5]


def test_a_replaced_or_cut_log_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(HEAD + line(1.0) + line(2.0))
    with LogTail(path, SLO) as tail:
        assert len(tail.read()) == 2
        path.unlink()
        assert len(tail.read()) == 0
        path.write_text(HEAD + line(3.0) + line(4.0))
        assert tail.read().arrival_s.tolist() == [3.0, 4.0]
        path.write_text(HEAD + line(5.0))
        assert tail.read().arrival_s.tolist() == [5.0]


@pytest.mark.parametrize("look_every", [1, 3, 17])
def test_no_line_is_lost_when_the_server_puts_its_log_aside(tmp_path: Path, look_every: int) -> None:
    """Files of about five lines, written by the server's own code; up to four of them between two looks."""
    path = tmp_path / "log.jsonl"
    path.write_text(HEAD)
    with LogTail(path, SLO) as tail:
        seen = tail.read().arrival_s.tolist()
        for part in range(0, 60, look_every):
            log = RequestLog(path, 1200, 8)
            for i in range(part, min(60, part + look_every)):
                log.write(json.loads(line(float(i))))
            log.close()
            seen += tail.read().arrival_s.tolist()
    assert seen == [float(i) for i in range(60)]
    assert (tmp_path / "log.jsonl.7").exists()


def test_what_clients_gave_up_or_got_wrong_is_not_held_against_the_server(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    errors = ("CANCELLED: gone", "INVALID_ARGUMENT: too long", "RESOURCE_EXHAUSTED: full")
    path.write_text(HEAD + "".join(line(float(i), outcome="failed", error=e) for i, e in enumerate(errors)))
    with LogTail(path, SLO) as tail:
        seen = tail.read()
    assert seen.arrival_s.tolist() == [0.0, 2.0]  # nothing was asked of the instances by the second one
    assert profile(seen, 0.0, 3.0).attainment == 0.0
    assert np.isnan(profile(seen, 0.0, 1.0).attainment)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": "request_log/9"}\n', "request_log/1"),
        ("not json\n", "not json"),
        ('{"arrived_at_s": 1.0}\n', "input_tokens"),
    ],
)
def test_lines_that_cannot_be_read_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with LogTail(path, SLO) as tail, pytest.raises(TraceError, match=message):
        tail.read()


def test_a_profile_sums_a_window_up() -> None:
    arrival = np.arange(0.0, 100.0)
    ones = np.ones(100, np.int64)
    history = History(arrival, 10 * ones, 20 * ones, np.full(100, 0.3), (arrival < 75) * 1.0)
    seen = profile(history, 50.0, 100.0)
    assert (seen.requests, seen.rate_rps, seen.mean_input, seen.mean_output) == (50, 1.0, 10.0, 20.0)
    assert seen.gap_cv == 0.0
    assert seen.attainment == 0.5
    assert seen.mean_queue_s == pytest.approx(0.3)
    assert np.isnan(profile(history, 200.0, 300.0).mean_input)
    with pytest.raises(TraceError, match="no request was served"):
        History.empty().trace()
