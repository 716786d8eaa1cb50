"""Load generator: what a record says, summaries, the open loop and its lag, the search for goodput."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from distserve_planner.slo import Slo
from distserve_planner.workload import Trace
from distserve_planner.workload.readers import read_trace
from distserve_tools.load.generator import GeneratorTooSlow, check_lag, make_jobs, run_open_loop
from distserve_tools.load.lengths import scaled
from distserve_tools.load.plots import attainment_at_scale, plot_runs
from distserve_tools.load.record import Record, write_log
from distserve_tools.load.search import find_goodput
from distserve_tools.load.summary import Summary, summarise
from distserve_tools.load.target import Job

SLO = Slo(1.0, 0.1)


def record(
    index: int = 0, sent: float = 0.0, ttft: float = 0.5, tpot: float = 0.05, tokens: int = 11
) -> Record:
    times = [sent + ttft + i * tpot for i in range(tokens)]
    return Record(index, sent, 8, sent, times, [1] * tokens, times[-1])


def trace(times: Sequence[float], outputs: int = 4) -> Trace:
    count = len(times)
    return Trace(np.array(times, float), np.full(count, 8, np.int64), np.full(count, outputs, np.int64))


class Answering:
    """A target that answers after `delay_s`, or never keeps the generator's thread free (`blocks_s`)."""

    def __init__(self, start_s: float, delay_s: float, blocks_s: float = 0.0) -> None:
        self.start_s, self.delay_s, self.blocks_s = start_s, delay_s, blocks_s
        self.closed = False

    async def send(self, job: Job, record: Record) -> None:
        import time

        record.sent_s = time.monotonic() - self.start_s
        time.sleep(self.blocks_s)
        await asyncio.sleep(self.delay_s)
        now = time.monotonic() - self.start_s
        record.token_s, record.token_counts, record.end_s = [now], [job.output_tokens], now

    async def close(self) -> None:
        self.closed = True


def test_a_record_knows_its_times() -> None:
    one = Record(0, 1.0, 8, 1.25, [2.25, 2.5, 3.25], [1, 2, 1], 3.5)
    assert one.lag_s == 0.25
    assert one.ttft_s == 1.0
    assert one.output_tokens == 4
    assert one.tpot_s == pytest.approx(1.0 / 3)  # tokens, not messages
    assert one.gaps_s == [0.25, 0.75]
    assert one.ok


def test_one_token_meets_any_tpot_and_no_token_is_a_failure() -> None:
    assert Record(0, 0.0, 8, 0.0, [0.5], [1], 0.5).tpot_s == 0.0
    assert not Record(0, 0.0, 8).ok
    assert not Record(0, 0.0, 8, 0.0, [0.5], [1], 0.5, error="UNAVAILABLE: gone").ok


def test_the_log_is_a_trace_without_the_failed(tmp_path: Path) -> None:
    late, early = record(0, sent=2.0), record(1, sent=1.0)
    failed = Record(2, 3.0, 8, 3.0, error="UNAVAILABLE: gone")
    write_log(tmp_path / "log.jsonl", [late, early, failed])
    read = read_trace(tmp_path / "log.jsonl")
    assert read.arrival_s.tolist() == [1.0, 2.0]
    assert read.output_tokens.tolist() == [11, 11]
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["error"] == failed.error


def test_attainment_needs_both_objectives_and_counts_failures_as_misses() -> None:
    records = [
        record(0),
        record(1, sent=1.0, ttft=1.5),
        record(2, sent=2.0, tpot=0.2),
        Record(3, 3.0, 8, 3.0, end_s=3.1, error="RESOURCE_EXHAUSTED: full"),
    ]
    seen = summarise(records, SLO)
    assert (seen.requests, seen.failed) == (4, 1)
    assert (seen.attainment, seen.ttft_attainment, seen.tpot_attainment) == (0.25, 0.5, 0.5)
    assert seen.attainment_low < 0.25 < seen.attainment_high
    assert seen.errors == {"RESOURCE_EXHAUSTED: full": 1}
    assert seen.offered_rps == pytest.approx(1.0)
    assert seen.itl_s["p50"] == pytest.approx(0.05)
    assert seen.ttft_s["p50"] == pytest.approx(0.5)


def test_warm_up_is_left_out() -> None:
    records = [record(0, ttft=9.0), record(1, sent=10.0)]
    assert summarise(records, SLO, warmup_s=5.0).attainment == 1.0
    with pytest.raises(ValueError, match="warmup_s=20"):
        summarise(records, SLO, warmup_s=20.0)


def test_arrivals_do_not_wait_for_replies() -> None:
    made: list[Answering] = []
    planned = trace([0.0, 0.02, 0.04, 0.06])

    def target(start: float) -> Answering:
        made.append(Answering(start, delay_s=0.3))
        return made[0]

    records = asyncio.run(run_open_loop(target, planned, make_jobs(planned, 100, 0)))
    assert all(r.ok for r in records)
    assert max(r.sent_s for r in records) < min(r.token_s[0] for r in records)
    assert made[0].closed


def test_a_generator_that_lags_refuses_to_report() -> None:
    planned = trace([0.0, 0.0, 0.0, 0.0])
    jobs = make_jobs(planned, 100, 0)
    records = asyncio.run(run_open_loop(lambda s: Answering(s, 0.0, blocks_s=0.05), planned, jobs))
    with pytest.raises(GeneratorTooSlow, match="allowed: 50 ms"):
        check_lag(records, 0.05)
    assert check_lag(records, 5.0) > 0.05


def test_prompts_are_reproducible_and_in_the_vocabulary() -> None:
    planned = trace([0.0, 1.0], outputs=3)
    jobs = make_jobs(planned, 50, 1)
    assert jobs == make_jobs(planned, 50, 1)
    assert [len(j.prompt) for j in jobs] == [8, 8]
    assert all(10 <= token < 50 for job in jobs for token in job.prompt)


def test_scaled_lengths_fit_the_context() -> None:
    long = Trace(np.zeros(3), np.array([1, 1000, 4000]), np.array([1, 100, 4000]))
    small = scaled(long, 0.25, 512)
    assert small.input_tokens.tolist() == [1, 250, 256]
    assert small.output_tokens.tolist() == [1, 25, 256]


def synthetic(limit: float) -> tuple[list[float], object]:
    """A server whose attainment falls from 1 to 0 around `limit`."""
    asked: list[float] = []

    def measure(rate: float) -> list[Summary]:
        asked.append(rate)
        share = 1 / (1 + math.exp(min(500.0, 20 * (rate / limit - 1))))
        good = round(100 * share)
        return [summarise([record(i, ttft=0.5 if i < good else 2.0) for i in range(100)], SLO)]

    return asked, measure


@pytest.mark.parametrize("limit", [0.3, 1.5, 20.0])
def test_the_search_brackets_whatever_it_is_started_with(limit: float) -> None:
    asked, measure = synthetic(limit)
    goodput, probes = find_goodput(measure, 0.9, 1.0, 2.0, step=0.05)  # type: ignore[arg-type]
    crossing = limit * (1 + math.log(1 / 0.9 - 1) / 20)
    assert crossing / 1.07 <= goodput <= crossing * 1.02
    assert [probe.rate_rps for probe in probes] == asked


def test_a_server_that_never_passes_has_no_goodput() -> None:
    _, measure = synthetic(1e-3)
    assert find_goodput(measure, 0.9, 1.0, 2.0)[0] == 0.0  # type: ignore[arg-type]


def test_attainment_rises_with_the_scale_and_plots_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [record(i, sent=float(i), ttft=0.2 + 0.1 * i) for i in range(20)]
    shares = [attainment_at_scale(records, SLO, scale) for scale in (0.5, 1.0, 2.0)]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]
    for one in records:
        one.stages = {"prefill": 0.1, "decode": 0.4}
    paths = plot_runs({"server": {1.0: records, 2.0: records}}, SLO, tmp_path)
    assert len(paths) == 4
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
