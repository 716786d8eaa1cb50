"""Workloads: fits, means, correlation, resampling with common random numbers, the command."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from distserve.core.parsing import ConfigError
from distserve_planner.commands import workload as command
from distserve_planner.workload import (
    Arrivals,
    JointLengths,
    Quantiles,
    Trace,
    Workload,
    named_workload,
    workload_names,
)
from distserve_planner.workload.arrivals import fit_arrivals
from distserve_planner.workload.lengths import spearman, with_means
from distserve_planner.workload.readers import read_trace
from distserve_planner.workload.stats import trace_stats


def correlated_trace(count: int = 4000, cv: float = 1.0, rho: float = 0.6) -> Trace:
    rng = np.random.default_rng(3)
    z = rng.multivariate_normal([0, 0], [[1, rho], [rho, 1]], count)
    lengths = np.maximum(1, np.exp(5 + 0.8 * z)).astype(np.int64)
    gaps = rng.gamma(1 / cv**2, cv**2 / 2.0, count)
    return Trace(np.cumsum(gaps), lengths[:, 0].copy(), lengths[:, 1].copy())


@pytest.mark.parametrize(
    ("name", "mean_input", "mean_output"),
    [("sharegpt", 755.5, 200.3), ("humaneval", 171.3, 98.2), ("longbench", 1738.3, 90.7)],
)
def test_named_workloads_have_the_papers_means(name: str, mean_input: float, mean_output: float) -> None:
    workload = named_workload(name)
    assert workload.lengths.means() == pytest.approx((mean_input, mean_output), rel=0.002)
    trace = workload.resample(1, 2.0, 20_000)
    assert trace.input_tokens.mean() == pytest.approx(mean_input, rel=0.015)
    assert trace.output_tokens.mean() == pytest.approx(mean_output, rel=0.015)
    assert int((trace.input_tokens + trace.output_tokens).max()) < 2048


def test_named_workloads_differ_in_shape() -> None:
    assert workload_names() == ("humaneval", "longbench", "sharegpt")
    spread = {n: trace_stats(named_workload(n).resample(0, 1.0, 4000)).input for n in workload_names()}
    assert spread["longbench"].p50 > spread["longbench"].mean  # most prompts are cut near the context's end
    assert spread["humaneval"].p50 < spread["humaneval"].mean
    with pytest.raises(ConfigError, match="did you mean 'sharegpt'"):
        named_workload("shargpt")


def test_fit_keeps_marginals_and_correlation() -> None:
    trace = correlated_trace()
    again = Workload.fit(trace).resample(7, None, 20_000)
    assert again.rate_rps == pytest.approx(2.0, rel=0.05)
    for column in ("input_tokens", "output_tokens"):
        for q in (0.05, 0.5, 0.9, 0.99):
            expected = np.quantile(getattr(trace, column), q)
            assert np.quantile(getattr(again, column), q) == pytest.approx(expected, rel=0.08)
    before = spearman(trace.input_tokens, trace.output_tokens)
    assert spearman(again.input_tokens, again.output_tokens) == pytest.approx(before, abs=0.03)


@pytest.mark.parametrize(("cv", "process"), [(1.0, "poisson"), (0.4, "gamma"), (3.0, "gamma")])
def test_arrival_process_is_recognised(cv: float, process: str) -> None:
    found = fit_arrivals(correlated_trace(cv=cv))
    assert found.process == process
    assert found.cv == pytest.approx(cv, rel=0.1)
    assert found.rate_rps == pytest.approx(2.0, rel=0.15)
    unit = found.unit_times(np.random.default_rng(0), 50_000)
    gaps = np.diff(unit)
    assert gaps.mean() == pytest.approx(1.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_common_random_numbers() -> None:
    workload = named_workload("sharegpt")
    slow, fast, short = (workload.resample(5, r, n) for r, n in ((1.0, 6000), (4.0, 6000), (1.0, 10)))
    assert np.array_equal(slow.input_tokens, fast.input_tokens)
    assert np.array_equal(slow.output_tokens, fast.output_tokens)
    assert slow.arrival_s == pytest.approx(4 * fast.arrival_s, rel=1e-12)
    assert np.array_equal(short.arrival_s, slow.arrival_s[:10])
    assert np.array_equal(short.output_tokens, slow.output_tokens[:10])
    assert slow.arrival_s[0] == 0.0
    other = workload.resample(6, 1.0, 6000)
    assert not np.array_equal(other.input_tokens, slow.input_tokens)


def test_bursty_traces_share_prefixes_too() -> None:
    arrivals = Arrivals("gamma", 2.5)
    long, short = (arrivals.unit_times(np.random.default_rng(1), n) for n in (1000, 50))
    assert np.array_equal(long[:50], short)


def test_trace_is_rescaled_and_cut() -> None:
    trace = correlated_trace(100)
    assert trace.at_rate(7.0).rate_rps == pytest.approx(7.0)
    assert trace.at_rate(7.0).arrival_s[0] == 0.0
    assert len(trace.head(9)) == 9


def test_means_move_within_the_range() -> None:
    lengths = JointLengths.fit(correlated_trace())
    moved = with_means(lengths, 100.0, 400.0)
    assert moved.means() == pytest.approx((100.0, 400.0), rel=1e-3)
    assert moved.input.tokens[0] == lengths.input.tokens[0]
    assert moved.output.tokens[-1] == lengths.output.tokens[-1]
    with pytest.raises(ConfigError, match="the nearest reached"):
        with_means(lengths, lengths.input.tokens[-1] * 2, None)


def test_quadrature_agrees_with_sampling() -> None:
    lengths = JointLengths.fit(correlated_trace(), max_total_tokens=600)
    inputs, outputs = lengths.sample(np.random.default_rng(0), 100_000)
    assert lengths.means() == pytest.approx((inputs.mean(), outputs.mean()), rel=0.01)
    assert int((inputs + outputs).max()) < 600


def test_impossible_totals_are_refused() -> None:
    marginal = Quantiles((0.0, 1.0), (1.0, 1000.0))
    with pytest.raises(ConfigError, match="no pair is that short"):
        JointLengths(marginal, marginal, 0.0, 2)
    rare = JointLengths(marginal, marginal, 0.0, 20)
    with pytest.raises(ConfigError, match="less than 1 %"):
        rare.sample(np.random.default_rng(0), 10)


def test_ranks_handle_ties() -> None:
    assert spearman([1, 2, 2, 3], [10, 20, 20, 30]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 1], [3, 2, 1]) == 0.0


def test_workload_survives_its_file(tmp_path: Path) -> None:
    workload = Workload.fit(correlated_trace(cv=2.0), name="mine", max_total_tokens=4096)
    workload.save(tmp_path / "w.yaml")
    assert Workload.load(tmp_path / "w.yaml") == workload
    assert named_workload(str(tmp_path / "w.yaml")) == workload


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("process: gamma", "process: pareto", "'pareto' is not allowed"),
        ("correlation:", "corelation:", "did you mean 'correlation'"),
        ("process: gamma", "process: poisson", "a poisson process has cv=1"),
    ],
)
def test_bad_workload_files_are_refused(old: str, new: str, message: str) -> None:
    text = Workload.fit(correlated_trace(cv=2.0)).dump()
    assert old in text
    with pytest.raises(ConfigError, match=message):
        Workload.parse(text.replace(old, new))


def test_resampling_refuses_nonsense() -> None:
    workload = named_workload("humaneval")
    for rate, count, message in ((None, 5, "no rate of its own"), (0.0, 5, "rate=0"), (1.0, 0, "requests=0")):
        with pytest.raises(ConfigError, match=message):
            workload.resample(0, rate, count)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(list(words)))


def test_command_fits_and_resamples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, fitted, new = (str(tmp_path / n) for n in ("t.csv", "w.yaml", "new.csv"))
    command.write_csv(correlated_trace(800), trace)
    assert run(trace, "--fit", fitted, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["statistics"]["requests"] == 800
    assert document["statistics"]["rate_rps"] == pytest.approx(2.0, rel=0.1)
    assert run(fitted, "--resample", new, "--rate", "3", "--requests", "500", "--seed", "4") == 0
    again = read_trace(new)
    expected = Workload.load(fitted).resample(4, 3.0, 500)
    assert np.array_equal(again.input_tokens, expected.input_tokens)
    assert again.arrival_s == pytest.approx(expected.arrival_s, abs=1e-6)
    assert "wrote trace of 500 requests" in capsys.readouterr().out.replace("\n", " ")


def test_command_invents_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    run("humaneval", "--json")
    statistics = json.loads(capsys.readouterr().out)["statistics"]
    assert statistics["rate_rps"] is None
    assert statistics["input"]["mean"] == pytest.approx(171.3, rel=0.03)


def test_command_moves_means(tmp_path: Path) -> None:
    out = str(tmp_path / "w.yaml")
    run("humaneval", "--fit", out, "--name", "longer", "--mean-output", "150")
    workload = Workload.load(out)
    assert workload.name == "longer"
    assert workload.lengths.means() == pytest.approx((171.3, 150.0), rel=0.005)


def test_command_refuses_unknown_sources() -> None:
    with pytest.raises(ConfigError, match="did you mean 'longbench'"):
        run("longbensh")
