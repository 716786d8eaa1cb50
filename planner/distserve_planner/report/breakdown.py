"""Where the time of a request goes, and how long KV transfers take (paper, Fig. 10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from distserve_planner.report.attainment_curves import AttainmentCurves
from distserve_planner.report.points import TRANSFER_PERCENTILES, Swept
from distserve_planner.report.section import Panel, Section, missing, table
from distserve_planner.report.style import colour, legend_above
from distserve_planner.report.systems import Case
from distserve_planner.simulator.records import STAGES
from distserve_planner.slo import seconds

TITLE, PAPER = "Latency breakdown and KV transfer", "Fig. 10"


@dataclass(frozen=True)
class Breakdown:
    """rates: requests/s per device. shares: [rate][stage], of the mean time from arrival to last token.

    transfer_s: at `transfer_rate`, by `percentiles`; links of the slowest pair included.
    """

    label: str
    deployment: str
    goodput: float
    stages: tuple[str, ...]
    rates: tuple[float, ...]
    shares: tuple[tuple[float, ...], ...]
    seconds: tuple[tuple[float, ...], ...]
    transfer_rate: float
    percentiles: tuple[int, ...]
    transfer_s: tuple[float, ...]


def breakdown(case: Case, curves: AttainmentCurves) -> Breakdown | None:
    """Of the best disaggregated system, up to the first rate above its goodput; None without one."""
    system = case.disaggregated
    swept = curves.of(system.role) if system is not None else None
    if swept is None or not any(sum(p.stages_s) > 0 for p in swept.points):
        return None
    chosen = _within(swept)
    nearest = min(chosen, key=lambda p: abs(p.rate / swept.devices - swept.goodput))
    return Breakdown(
        swept.label,
        swept.deployment,
        swept.goodput,
        STAGES,
        tuple(p.rate / swept.devices for p in chosen),
        tuple(tuple(s / sum(p.stages_s) for s in p.stages_s) for p in chosen),
        tuple(p.stages_s for p in chosen),
        nearest.rate / swept.devices,
        TRANSFER_PERCENTILES,
        nearest.transfer_s,
    )


def _within(swept: Swept) -> list[Any]:
    """Points up to the goodput and one more."""
    count = sum(p.rate / swept.devices <= swept.goodput for p in swept.points)
    return [p for p in swept.points if sum(p.stages_s) > 0][: max(2, count + 1)]


def breakdown_section(data: Breakdown | None) -> Section:
    """The section of the page."""
    if data is None:
        return missing(
            "breakdown", TITLE, PAPER, "no disaggregated placement meets the objectives in this case"
        )
    nearest = min(range(len(data.rates)), key=lambda i: abs(data.rates[i] - data.transfer_rate))
    transfer = data.shares[nearest][3]
    p95 = float(np.interp(95, data.percentiles, data.transfer_s))
    reading = (
        f"{data.label} at rising rates, the last one above its goodput of {data.goodput:.3g}. Each bar "
        "splits the mean time of a request into the five stages that add up to it. A wide queue on either "
        f"side names the phase that needs more devices. At {data.transfer_rate:.3g} requests/s per device "
        f"the KV transfer takes {100 * transfer:.2g} % of the time (the paper reports less than 0.1 %), 95 "
        f"% of transfers within {seconds(p95)} (the paper: 30 ms)."
    )
    return Section(
        "breakdown",
        TITLE,
        PAPER,
        reading,
        "Predicted by simulation. A transfer is priced by the links between its stages, with those that "
        "share a link queueing for it; waiting for room at the decode instance counts as decode queue.",
        data,
        (
            Panel("stages", lambda axes: _draw_stages(axes, data), "Share of each stage in the mean latency"),
            Panel("first", lambda axes: _draw_first(axes, data), "Milliseconds of all stages but decode"),
            Panel("transfer", lambda axes: _draw_transfer(axes, data), "Distribution of KV transfer times"),
        ),
        table(
            ("req/s/device", *data.stages),
            [
                (f"{rate:.3g}", *(seconds(s) for s in row))
                for rate, row in zip(data.rates, data.seconds, strict=True)
            ],
        ),
    )


def _draw_stages(axes: Any, data: Breakdown) -> None:
    labels = [f"{rate:.2g}" for rate in data.rates]
    bottom = np.zeros(len(labels))
    places = np.arange(len(labels))
    for i, stage in enumerate(data.stages):
        heights = np.array([100 * row[i] for row in data.shares])
        axes.bar(places, heights, bottom=bottom, width=0.74, color=colour(f"stage{i}"), label=stage)
        bottom += heights
    axes.set_xticks(places, labels)
    axes.set(xlabel="rate (requests/s per device)", ylabel="share of the mean latency (%)", ylim=(0, 100))
    axes.grid(axis="x", visible=False)
    legend_above(axes, data.label)


def _draw_first(axes: Any, data: Breakdown) -> None:
    places = np.arange(len(data.rates))
    bottom = np.zeros(len(places))
    for i, stage in enumerate(data.stages[:-1]):
        heights = np.array([1000 * row[i] for row in data.seconds])
        axes.bar(places, heights, bottom=bottom, width=0.74, color=colour(f"stage{i}"), label=stage)
        bottom += heights
    axes.set_xticks(places, [f"{rate:.2g}" for rate in data.rates])
    axes.set(xlabel="rate (requests/s per device)", ylabel="mean (ms)")
    axes.grid(axis="x", visible=False)
    legend_above(axes, f"{data.label} without decode")


def _draw_transfer(axes: Any, data: Breakdown) -> None:
    times = 1000 * np.array(data.transfer_s)
    axes.step(times, data.percentiles, where="post", color=colour("stage3"))
    axes.set(
        xlabel="KV transfer of a request (ms)",
        ylabel="requests (%)",
        ylim=(0, 102),
        title=f"at {data.transfer_rate:.3g} requests/s per device",
    )
    axes.set_xlim(left=0)
