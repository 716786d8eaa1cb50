"""The ratio of prefill to decode instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distserve_planner.goodput import Goodput
from distserve_planner.report.effort import Effort
from distserve_planner.report.goodputs import phase_goodputs
from distserve_planner.report.section import Panel, Section, missing, table
from distserve_planner.report.style import colour, legend_above
from distserve_planner.report.systems import Case
from distserve_planner.search.assignment import assign
from distserve_planner.search.candidates import high_hops
from distserve_planner.search.deployment import Deployment, Group
from distserve_planner.search.tasks import DeploymentTask, PhaseTask
from distserve_planner.search.workers import Workers

TITLE, PAPER = "Prefill to decode ratio", "section 4.1, Algorithm 1"


@dataclass(frozen=True)
class Mix:
    """n prefill and m decode instances: share of devices for prefill, requests/s per device.

    joint: simulated together; None where it was not.
    """

    prefills: int
    decodes: int
    share: float
    predicted: float
    joint: float | None = None


@dataclass(frozen=True)
class Ratio:
    """prefill_rate, decode_rate: requests/s of one instance of each shape alone. best_share: of devices."""

    prefill: str
    decode: str
    prefill_devices: int
    decode_devices: int
    prefill_rate: float
    decode_rate: float
    best_share: float
    best_goodput: float
    mixes: tuple[Mix, ...]


def best_share(prefill_rate: float, decode_rate: float) -> float:
    """Share of devices for prefill at which neither phase waits; rates are per device of each phase.

    x a = (1 - x) b.
    """
    return decode_rate / (prefill_rate + decode_rate)


def mix_rate(n: int, prefill_rate: float, m: int, decode_rate: float) -> float:
    """Requests/s of n and m instances: the slower phase's."""
    return min(n * prefill_rate, m * decode_rate)


def ratio(case: Case, effort: Effort, workers: Workers) -> Ratio | None:
    """Of the best disaggregated system's shapes, for all numbers of instances that the cluster holds."""
    system = case.disaggregated
    if system is None:
        return None
    prefill, decode = system.deployment.prefill, system.deployment.decode
    assert prefill is not None
    assert decode is not None
    problem = case.problem
    tasks = [
        PhaseTask("prefill", prefill.shape, high_hops(problem, prefill.shape)),
        PhaseTask("decode", decode.shape, high_hops(problem, decode.shape)),
    ]
    found = phase_goodputs(tasks, workers)
    a, b = (found[task].rate for task in tasks)
    if not a or not b:
        return None
    rp, rd = prefill.shape.ranks, decode.shape.ranks
    total = problem.cluster.num_devices
    counts = [
        (n, m)
        for n in range(1, total // rp + 1)
        for m in range(1, (total - n * rp) // rd + 1)
        if np.gcd(n, m) == 1
    ]
    deployments = {
        (n, m): Deployment("high", Group(prefill.shape, n), Group(decode.shape, m)) for n, m in counts
    }
    if system.deployment.paired:
        deployments[1, 1] = system.deployment.with_units(1)
    fitting = [c for c in counts if assign(deployments[c], problem.cluster) is not None]
    chosen = _best_first(fitting, a, b, rp, rd)[: 2 * effort.joint_points]
    joint = workers.map(
        [
            DeploymentTask(deployments[c], ceiling=1.1 * mix_rate(c[0], a, c[1], b), first_step=4)
            for c in chosen
        ]
    )
    rates = {c: r.rate for c, r in zip(chosen, joint, strict=True) if isinstance(r, Goodput)}
    share = best_share(a / rp, b / rd)
    mixes = tuple(_mix(c, a, b, rp, rd, rates.get(c)) for c in fitting)
    return Ratio(
        f"tp {prefill.shape.tp}, pp {prefill.shape.pp}", f"tp {decode.shape.tp}, pp {decode.shape.pp}",
        rp, rd, a, b, share, share * a / rp, tuple(sorted(mixes, key=lambda m: m.share)),
    )  # fmt: skip


def _best_first(
    counts: Sequence[tuple[int, int]], a: float, b: float, rp: int, rd: int
) -> list[tuple[int, int]]:
    def score(count: tuple[int, int]) -> tuple[float, int]:
        n, m = count
        return (-mix_rate(n, a, m, b) / (n * rp + m * rd), n + m)

    return sorted(counts, key=score)


def _mix(count: tuple[int, int], a: float, b: float, rp: int, rd: int, joint: float | None) -> Mix:
    n, m = count
    devices = n * rp + m * rd
    predicted = mix_rate(n, a, m, b) / devices
    return Mix(n, m, n * rp / devices, predicted, None if joint is None else joint / devices)


def ratio_section(data: Ratio | None) -> Section:
    """The section of the page."""
    if data is None:
        return missing("ratio", TITLE, PAPER, "no disaggregated placement meets the objectives in this case")
    tried = [m for m in data.mixes if m.joint is not None]
    best = max(tried, key=lambda m: m.joint or 0.0)
    instances = data.decode_rate / data.prefill_rate
    wanted = (
        f"{instances:.2f} prefill instances per decode instance"
        if instances >= 1
        else f"{1 / instances:.2f} decode instances per prefill instance"
    )
    reading = (
        f"Prefill ({data.prefill}) alone serves {data.prefill_rate:.3g} requests/s per instance, decode "
        f"({data.decode}) {data.decode_rate:.3g}, so they are balanced at {wanted}, "
        f"{100 * data.best_share:.0f} % of the devices for prefill. Left of the peak prefill limits, right "
        f"of it decode. Of the whole numbers on this cluster the best is {best.prefills}:{best.decodes} "
        f"with {best.joint:.3g} requests/s per device."
    )
    return Section(
        "ratio",
        TITLE,
        PAPER,
        reading,
        "Line: each phase simulated alone, n to m in any ratio. Rings: whole numbers of instances, both "
        "phases simulated jointly; small dots: the arithmetic for the same numbers. "
        "Instances that do not share a node exchange KV over the network, which can cost more than the right "
        "ratio gains.",
        data,
        (
            Panel(
                "share",
                lambda axes: _draw(axes, data),
                "Goodput per device against the share of prefill devices",
            ),
        ),
        table(
            (
                "prefill : decode",
                "devices for prefill",
                "by arithmetic, req/s/device",
                "jointly, req/s/device",
            ),
            [
                (
                    f"{m.prefills} : {m.decodes}",
                    f"{100 * m.share:.0f} %",
                    f"{m.predicted:.3g}",
                    "" if m.joint is None else f"{m.joint:.3g}",
                )
                for m in data.mixes
            ],
        ),
    )


def _draw(axes: Any, data: Ratio) -> None:
    shares = np.linspace(0, 1, 201)
    a, b = data.prefill_rate / data.prefill_devices, data.decode_rate / data.decode_devices
    axes.plot(
        100 * shares, np.minimum(shares * a, (1 - shares) * b), color=colour("muted"), label="phases alone"
    )
    axes.plot(
        [100 * m.share for m in data.mixes], [m.predicted for m in data.mixes], ".", color=colour("muted")
    )
    tried = [m for m in data.mixes if m.joint is not None]
    axes.plot(
        [100 * m.share for m in tried], [m.joint for m in tried], "o", markerfacecolor="none", markersize=8,
        markeredgecolor=colour("high"), label="jointly",
    )  # fmt: skip
    labelled: list[float] = []
    for m in sorted(tried, key=lambda m: -(m.joint or 0.0)):
        if all(abs(m.share - other) > 0.055 for other in labelled):
            labelled.append(m.share)
            below = (m.joint or 0.0) > 0.2 * data.best_goodput
            axes.annotate(
                f"{m.prefills}:{m.decodes}", (100 * m.share, m.joint), xytext=(0, -15 if below else 7),
                ha="center", textcoords="offset points", fontsize=8.5, color=colour("high"),
            )  # fmt: skip
    axes.axvline(100 * data.best_share, color=colour("limit"), linestyle=(0, (4, 3)), linewidth=1)
    axes.set(
        xlabel="devices for prefill (%)", ylabel="goodput (requests/s per device)", xlim=(0, 100),
    )  # fmt: skip
    axes.set_ylim(0, 1.15 * data.best_goodput)
    legend_above(axes, "prefill : decode instances")
