"""How long the search takes against devices, model size and cores (paper, Fig. 12). Measured, so opt-in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from distserve.core.parsing import ConfigError
from distserve_planner.devices.catalog import latency_model
from distserve_planner.report.effort import Effort
from distserve_planner.report.section import Panel, Section, missing, table
from distserve_planner.report.style import colour
from distserve_planner.report.systems import Case, with_nodes
from distserve_planner.report.text import Done, plural
from distserve_planner.search.problem import Family, Problem
from distserve_planner.search.result import Objective
from distserve_planner.search.search import search
from distserve_planner.slo import Slo, seconds

TITLE, PAPER = "Search time", "Fig. 12"
DEVICES = (2, 4, 8, 16, 32)
MODEL_DEVICES = 8  # at least, so that the largest model fits
FAMILIES: tuple[tuple[str, Family], ...] = (("DistServe-High", "high"), ("DistServe-Low", "low"))


@dataclass(frozen=True)
class Timed:
    """One measured search: what was varied, and what it cost. found: whether it had a placement to offer."""

    series: str
    value: str
    devices: int
    seconds: float
    candidates: int
    found: bool


@dataclass(frozen=True)
class SearchTime:
    """jobs: worker processes of the first two; precision: requests per simulation, at most."""

    jobs: int
    cores: int
    requests: int
    by_devices: tuple[Timed, ...]
    by_model: tuple[Timed, ...]
    by_jobs: tuple[Timed, ...]


def search_time(case: Case, effort: Effort, cores: int, done: Done | None = None) -> SearchTime:
    """Times searches one after the other. Sizes grow until one takes `effort.timed_search_s`."""
    finished = 0
    jobs_tried = sorted({1, cores, *(2**i for i in range(1, 8) if 2**i < cores)})
    total = len(FAMILIES) * len(DEVICES) + len(sibling_models(case.problem)) + len(jobs_tried)

    def tick() -> None:
        nonlocal finished
        finished += 1
        if done is not None:
            done(min(finished, total), total)

    problem = case.problem
    by_devices = []
    for label, family in FAMILIES:
        for devices in DEVICES:
            timed = measure(
                label, str(devices), replace(with_nodes(problem, devices), families=(family,)), cores
            )
            by_devices.append(timed)
            tick()
            if timed.seconds > effort.timed_search_s:
                break
    by_model = []
    larger = with_nodes(problem, max(MODEL_DEVICES, problem.cluster.num_devices))
    for name in sibling_models(problem):
        by_model.append(measure("model", name, _with_model(larger, name), cores))
        tick()
    by_jobs = []
    for jobs in jobs_tried:
        by_jobs.append(
            measure("cores", str(jobs), with_nodes(problem, problem.cluster.devices_per_node), jobs)
        )
        tick()
    return SearchTime(
        cores, cores, problem.precision.max_requests, tuple(by_devices), tuple(by_model), tuple(by_jobs)
    )


def measure(
    series: str,
    value: str,
    problem: Problem,
    jobs: int,
    clock: Callable[[], float] = time.monotonic,
) -> Timed:
    """Times one search, also one that finds that nothing is possible."""
    began = clock()
    try:
        result = search(problem, Objective(), jobs)
    except ConfigError:
        return Timed(series, value, problem.cluster.num_devices, clock() - began, 0, False)
    took = clock() - began
    return Timed(series, value, problem.cluster.num_devices, took, result.statistics.candidates, True)


def sibling_models(problem: Problem) -> tuple[str, ...]:
    """The case's model and measured ones of its family: the paper's three OPT sizes."""
    name = problem.latency.model_name.rsplit("/", 1)[-1].lower()
    family = ("opt-13b", "opt-66b", "opt-175b")
    return family if name in family else (problem.latency.model_name,)


def _with_model(problem: Problem, name: str) -> Problem:
    """Another model on the same cluster, its objectives scaled by how much slower it is."""
    if name == problem.latency.model_name:
        return problem
    other = latency_model(problem.cluster.device, name)
    return replace(
        problem, latency=other, unified_latency=None, slo=_scaled_slo(problem, other.model.param_count())
    )


def _scaled_slo(problem: Problem, params: int) -> Slo:
    return problem.slo.scaled(max(1.0, params / problem.model.param_count()))


def search_time_section(data: SearchTime | None) -> Section:
    """The section of the page; `data` is None if it was not asked for."""
    if data is None:
        return missing(
            "search-time",
            TITLE,
            PAPER,
            "not measured: it runs the search many times; ask for it with --search-time",
        )
    longest = max((*data.by_devices, *data.by_model, *data.by_jobs), key=lambda t: t.seconds)
    one, most = data.by_jobs[0], data.by_jobs[-1]
    reading = (
        f"Seconds that a search takes on this machine ({data.cores} cores). The longest here took "
        f"{seconds(longest.seconds)} ({longest.series}, {longest.value}); from {one.value} to {most.value} "
        f"processes the case's own search gets {one.seconds / most.seconds:.2f} times as fast."
    )
    everything = (*data.by_devices, *data.by_model, *data.by_jobs)
    return Section(
        "search-time",
        TITLE,
        PAPER,
        reading,
        f"Measured on this machine while it may have done other work, up to {data.requests} requests per "
        "simulation. The paper's machine has 96 cores and simulates 300 requests. Larger models get "
        "objectives looser by their size. A search that finds at once that nothing is possible is shown "
        "hollow.",
        data,
        (
            Panel("devices", lambda axes: _draw_devices(axes, data), "Search time against devices"),
            Panel(
                "model", lambda axes: _draw_named(axes, data.by_model, "model"), "Search time against model"
            ),
            Panel(
                "cores",
                lambda axes: _draw_named(axes, data.by_jobs, "processes"),
                "Search time against cores",
            ),
        ),
        table(
            ("varied", "value", "devices", "time", "candidates"),
            [(t.series, t.value, str(t.devices), seconds(t.seconds), str(t.candidates)) for t in everything],
        ),
    )


def _draw_devices(axes: Any, data: SearchTime) -> None:
    for label, family in FAMILIES:
        timed = [t for t in data.by_devices if t.series == label]
        axes.plot([t.devices for t in timed], [t.seconds for t in timed], color=colour(family), label=label)
        for t in timed:
            face = colour(family) if t.found else "none"
            axes.plot([t.devices], [t.seconds], "o", markeredgecolor=colour(family), markerfacecolor=face)
    axes.set(xscale="log", xlabel="devices", ylabel="search (s)", title="devices")
    shown = sorted({t.devices for t in data.by_devices})
    axes.set_xticks(shown, [str(d) for d in shown])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")


def _draw_named(axes: Any, timed: tuple[Timed, ...], name: str) -> None:
    places = range(len(timed))
    for i, t in enumerate(timed):
        face = colour("shade3") if t.found else "none"
        axes.bar([i], [t.seconds], width=0.55, facecolor=face, edgecolor=colour("shade3"))
        axes.text(i, t.seconds, seconds(t.seconds), ha="center", va="bottom", fontsize=9, color=colour("ink"))
    axes.set_xticks(places, [t.value for t in timed])
    devices = timed[0].devices
    axes.set(xlabel=name, ylabel="search (s)", title=f"{name}, {plural(devices, 'device')}")
    axes.set_ylim(0, 1.2 * max(t.seconds for t in timed))
    axes.grid(axis="x", visible=False)
