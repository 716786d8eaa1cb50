"""Goodput against devices: what each family makes of a cluster of any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distserve_planner.goodput import Goodput
from distserve_planner.report.effort import Effort
from distserve_planner.report.goodputs import phase_goodputs
from distserve_planner.report.section import Panel, Section, missing, table
from distserve_planner.report.style import colour, legend_above
from distserve_planner.report.systems import Case, with_nodes
from distserve_planner.search.algorithm1 import combinations
from distserve_planner.search.candidates import high_hops
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.problem import Problem
from distserve_planner.search.tasks import DeploymentTask, PhaseTask
from distserve_planner.search.workers import Workers

TITLE, PAPER = "Goodput against devices", "sections 4.1 and 6.3"
NAMES = {"high": "DistServe-High", "low": "DistServe-Low", "best": "vLLM++", "chunked": "chunked prefill"}


@dataclass(frozen=True)
class Step:
    """Best of one family on `devices`: requests/s in all, 0 if it does not fit; by arithmetic.

    joint: both phases simulated together, where that was done.
    """

    devices: int
    predicted: float
    deployment: str
    joint: float | None = None


@dataclass(frozen=True)
class Scaling:
    """By role, a step per number of devices."""

    sizes: tuple[int, ...]
    steps: Mapping[str, tuple[Step, ...]]


def cluster_sizes(problem: Problem) -> tuple[int, ...]:
    """Any number of devices on one node, then whole nodes."""
    per_node, nodes = problem.cluster.devices_per_node, problem.cluster.num_nodes
    return (*range(1, per_node + 1), *(per_node * n for n in range(2, nodes + 1)))


def scaling(case: Case, effort: Effort, goodputs: Mapping[Deployment, float], workers: Workers) -> Scaling:
    """Algorithm 1's arithmetic at every size, some also jointly; other families replicate their best unit."""
    sizes = cluster_sizes(case.problem)
    steps: dict[str, tuple[Step, ...]] = {}
    if "high" in case.problem.families:
        steps["high"] = _algorithm1(case, effort, sizes, goodputs, workers)
    for role in ("low", "best", "chunked"):
        units = _units(case, role, goodputs)
        if units:
            steps[role] = replicated(sizes, units)
    return Scaling(sizes, steps)


def _units(case: Case, role: str, goodputs: Mapping[Deployment, float]) -> list[tuple[Deployment, float]]:
    """Units of a family, with requests/s of each, whose goodput is known from the search."""
    system = case.system(role)
    if system is None:
        return []
    rates = {system.deployment: goodputs[system.deployment]}
    for row in case.result.rows:
        if row.deployment.family == system.deployment.family and row.entry is not None:
            rates.setdefault(row.deployment, row.entry.rate)
    return [(d.with_units(1), rate / d.units) for d, rate in rates.items() if rate > 0]


def replicated(sizes: tuple[int, ...], units: Sequence[tuple[Deployment, float]]) -> tuple[Step, ...]:
    """At each size the unit that serves most when it is repeated as often as it fits."""
    steps = []
    for size in sizes:
        rate, name = max(
            ((size // unit.devices * rate, str(unit)) for unit, rate in units), key=lambda option: option[0]
        )
        steps.append(Step(size, rate, name if rate else ""))
    return tuple(steps)


def _algorithm1(
    case: Case,
    effort: Effort,
    sizes: tuple[int, ...],
    goodputs: Mapping[Deployment, float],
    workers: Workers,
) -> tuple[Step, ...]:
    problem = case.problem
    small = [s for s in case.result.shapes.fitting if s.ranks < problem.cluster.num_devices]
    tasks = [PhaseTask("prefill", shape, high_hops(problem, shape)) for shape in small]
    tasks += [PhaseTask("decode", shape, high_hops(problem, shape)) for shape in small]
    phases = phase_goodputs(tasks, workers)
    best = []
    for size in sizes:
        found = combinations(with_nodes(problem, size), phases, per_device=False, keep=1)
        best.append(found[0] if found else None)
    chosen = _spread([i for i, candidate in enumerate(best) if candidate is not None], effort.joint_points)
    joint = workers.map(
        [
            DeploymentTask(candidate.deployment, ceiling=1.1 * candidate.predicted, first_step=4)
            for i in chosen
            if (candidate := best[i]) is not None
        ]
    )
    rates = {i: r.rate for i, r in zip(chosen, joint, strict=True) if isinstance(r, Goodput)}
    searched = [(d.devices, rate) for d, rate in goodputs.items() if d.family == "high"]
    for i in rates:  # the search has tried more combinations than the one that the arithmetic prefers
        rates[i] = max([rates[i], *(rate for devices, rate in searched if devices <= sizes[i])])
    return tuple(
        Step(size, 0.0, "")
        if candidate is None
        else Step(size, candidate.predicted, str(candidate.deployment), rates.get(i))
        for i, (size, candidate) in enumerate(zip(sizes, best, strict=True))
    )


def _spread(indices: list[int], count: int) -> list[int]:
    """Up to `count` of them, from last to first, evenly."""
    if len(indices) <= count:
        return indices
    step = (len(indices) - 1) / max(1, count - 1)
    return sorted({indices[round(i * step)] for i in range(count)})


def scaling_section(data: Scaling) -> Section:
    """The section of the page."""
    if not any(step.predicted for steps in data.steps.values() for step in steps):
        return missing("scaling", TITLE, PAPER, "no family meets the objectives at any rate on this cluster")
    ends = [(steps[-1].joint or steps[-1].predicted, NAMES[role]) for role, steps in data.steps.items()]
    ends.sort(reverse=True)
    most = data.sizes[-1]
    reading = (
        f"What a cluster of each size serves in total; on all {most} devices: "
        + ", ".join(f"{name} {rate:.3g} requests/s" for rate, name in ends)
        + ". Flat parts are devices left over until another instance fits; steps out of proportion show "
        "where a better ratio or shape becomes possible."
    )
    return Section(
        "scaling",
        TITLE,
        PAPER,
        reading,
        "Lines: arithmetic on simulated parts, each phase alone (Algorithm 1), or one unit times how often "
        "it fits. Rings: both phases simulated jointly with dispatch and transfers, which may fall short "
        "of the product of parts.",
        data,
        (
            Panel("total", lambda axes: _draw_total(axes, data), "Requests per second against devices"),
            Panel(
                "share",
                lambda axes: _draw_share(axes, data),
                "Requests per second and device against devices",
            ),
        ),
        table(
            ("devices", *(NAMES[role] for role in data.steps), "DistServe-High's instances"),
            [
                (
                    str(size),
                    *(f"{steps[i].predicted:.3g}" for steps in data.steps.values()),
                    data.steps["high"][i].deployment.partition(": ")[2] if "high" in data.steps else "",
                )
                for i, size in enumerate(data.sizes)
            ],
        ),
    )


def _draw_total(axes: Any, data: Scaling) -> None:
    _draw(axes, data, "total", lambda rate, devices: rate)
    axes.set(xlabel="devices", ylabel="goodput (requests/s)")


def _draw_share(axes: Any, data: Scaling) -> None:
    _draw(axes, data, "per device", lambda rate, devices: rate / devices)
    axes.set(xlabel="devices", ylabel="goodput (requests/s per device)")


def _draw(axes: Any, data: Scaling, title: str, value: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    dashes = {"high": "-", "low": "--", "best": "-", "chunked": "-."}
    for role, steps in data.steps.items():
        points = [(s.devices, value(s.predicted, s.devices)) for s in steps]
        axes.plot(
            [x for x, _ in points], [y for _, y in points], color=colour(role), linestyle=dashes[role],
            marker=".", label=NAMES[role],
        )  # fmt: skip
        joint = [(s.devices, value(s.joint, s.devices)) for s in steps if s.joint is not None]
        axes.plot(
            [x for x, _ in joint], [y for _, y in joint], "o", markerfacecolor="none",
            markeredgecolor=colour(role), markersize=8,
        )  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    legend_above(axes, title, columns=2)
