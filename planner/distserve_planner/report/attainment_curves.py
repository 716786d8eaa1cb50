"""Attainment against rate and against the scale of the objectives (paper, Fig. 8 and 9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from distserve_planner.report.effort import Effort
from distserve_planner.report.parallel import map_tasks
from distserve_planner.report.points import Point, Swept, point_tasks, rate_grid, simulator
from distserve_planner.report.section import Panel, Section, table
from distserve_planner.report.style import colour, legend_above
from distserve_planner.report.systems import Case, System
from distserve_planner.report.text import Done, factor, per_device
from distserve_planner.search.deployment import Deployment
from distserve_planner.slo import seconds

SCALES = tuple(float(s) for s in np.round(np.geomspace(0.25, 4.0, 33), 4))
MARKERS = {"high": "o", "low": "s", "best": "^", "vllm": "v", "chunked": "D", "own": "P"}
DASHES = {"high": "-", "low": "--", "best": "-", "vllm": "--", "chunked": "-.", "own": ":"}


@dataclass(frozen=True)
class AttainmentCurves:
    """attainment: the target share. scale_rate: requests/s per device at which the objectives are scaled.

    swept: by system, over rates. at_scale: by role, the attainment at each of `scales`. tightest: by role,
    the     smallest scale that still meets the target, interpolated, or None.
    """

    attainment: float
    ttft_s: float
    tpot_s: float
    swept: tuple[Swept, ...]
    scale_rate: float
    scales: tuple[float, ...]
    at_scale: Mapping[str, tuple[float, ...]]
    tightest: Mapping[str, float | None]

    def of(self, role: str) -> Swept | None:
        return next((s for s in self.swept if s.role == role), None)

    @property
    def ranked(self) -> list[Swept]:
        """By falling goodput."""
        return sorted(self.swept, key=lambda s: -s.goodput)


def attainment_curves(
    case: Case, effort: Effort, goodputs: Mapping[Deployment, float], done: Done | None = None
) -> AttainmentCurves:
    """Simulates every system over one grid of rates per device, and at one rate under all scales.

    That rate is the goodput of the best colocated system: what it can just serve, or 60 % of the best goodput
    where there is none.
    """
    per = {s.role: goodputs[s.deployment] / s.deployment.devices for s in case.systems}
    colocated = max((per[s.role] for s in case.systems if not s.disaggregated), default=0.0)
    scale_rate = colocated or 0.6 * max(per.values())
    rates = rate_grid(list(per.values()), effort.curve_points)
    tasks = [task for s in case.systems for task in point_tasks(s, rates, effort.curve_requests)]
    tasks += [point_tasks(s, (scale_rate,), 2 * effort.curve_requests, SCALES)[0] for s in case.systems]
    points = map_tasks(simulator(case), tasks, case.jobs, done)
    count = len(rates)
    swept = tuple(
        _swept(s, per[s.role], points[i * count : (i + 1) * count]) for i, s in enumerate(case.systems)
    )
    scaled = points[len(case.systems) * count :]
    at_scale = {s.role: p.at_scales for s, p in zip(case.systems, scaled, strict=True)}
    slo = case.problem.slo
    tightest = {role: crossing(SCALES, shares, slo.attainment) for role, shares in at_scale.items()}
    return AttainmentCurves(
        slo.attainment, slo.ttft_s, slo.tpot_s, swept, scale_rate, SCALES, at_scale, tightest
    )


def _swept(system: System, goodput: float, points: list[Point]) -> Swept:
    return Swept(
        system.role, system.label, str(system.deployment), system.deployment.devices, goodput, tuple(points)
    )


def crossing(xs: tuple[float, ...], shares: tuple[float, ...], target: float) -> float | None:
    """Where rising `shares` reach `target`, linear in between; None if they never do."""
    for i, share in enumerate(shares):
        if share >= target:
            if i == 0:
                return xs[0]
            weight = (target - shares[i - 1]) / (share - shares[i - 1])
            return xs[i - 1] + weight * (xs[i] - xs[i - 1])
    return None


def curves_section(data: AttainmentCurves) -> Section:
    """The section of the page."""
    first, *others = data.ranked
    reading = (
        f"Against rate, the further right a curve stays above the dashed {100 * data.attainment:g} % line, "
        f"the better: {first.label} serves {per_device(first.goodput)}"
    )
    reading += "".join(f", {s.label} {s.goodput:.3g}" if s.goodput else f", {s.label} none" for s in others)
    colocated = next((s for s in data.ranked if s.role in ("best", "vllm", "chunked")), None)
    if colocated is not None and first.role in ("high", "low") and colocated.goodput > 0:
        ratio = factor(first.goodput, colocated.goodput)
        reading += f". {first.label} has {ratio} the goodput of {colocated.label}"
    reading += (
        f". Against scale, at {per_device(data.scale_rate)}, both objectives are multiplied by it; a curve "
        "that reaches the dashed line further right holds under tighter objectives"
    )
    tight = [(scale, s.label) for s in data.swept if (scale := data.tightest[s.role]) is not None]
    if tight:
        reading += ": " + ", ".join(f"{label} down to {scale:.2f}" for scale, label in sorted(tight))
    reading += "."
    basis = (
        "Predicted by simulation, both objectives met together; bars are 95 % intervals. Beyond a system's "
        "goodput its queue keeps growing, so there the attainment also depends on how long the run is. All "
        "systems use the times of one engine unless another was given for the colocated ones."
    )
    return Section(
        "attainment",
        "SLO attainment against rate and against SLO scale",
        "Fig. 8 and 9",
        reading,
        basis,
        data,
        (
            Panel(
                "rate", lambda axes: draw_rates(axes, data, data.swept), "Attainment against rate per device"
            ),
            Panel(
                "scale",
                lambda axes: _draw_scales(axes, data),
                "Attainment against the scale of the objectives",
            ),
        ),
        table(
            ("system", "placement", "goodput, req/s/device", "tightest scale"),
            [
                (s.label, s.deployment, f"{s.goodput:.3g}", _scale_text(data.tightest[s.role]))
                for s in data.ranked
            ],
        ),
    )


def _scale_text(scale: float | None) -> str:
    return "none up to 4" if scale is None else f"{scale:.2f}"


def draw_rates(axes: Any, data: AttainmentCurves, swept: tuple[Swept, ...]) -> None:
    """Attainment against rate per device, with intervals, of some of the systems."""
    for s in swept:
        shares = np.array([100 * p.both for p in s.points])
        low, high = (np.array([100 * getattr(p, end) for p in s.points]) for end in ("low", "high"))
        axes.errorbar(
            s.rates,
            shares,
            yerr=[np.maximum(0, shares - low), np.maximum(0, high - shares)],
            elinewidth=0.8,
            color=colour(s.role),
            marker=MARKERS[s.role],
            linestyle=DASHES[s.role],
            label=s.label,
        )
    target_line(axes, data.attainment)
    axes.set(
        xlabel="rate (requests/s per device)",
        ylabel="SLO attainment (%)",
        ylim=(-3, 104),
    )
    axes.set_xlim(left=0)
    legend_above(axes, f"TTFT ≤ {seconds(data.ttft_s)}, TPOT ≤ {seconds(data.tpot_s)}")


def _draw_scales(axes: Any, data: AttainmentCurves) -> None:
    for s in data.swept:
        shares = [100 * share for share in data.at_scale[s.role]]
        axes.plot(data.scales, shares, color=colour(s.role), linestyle=DASHES[s.role], label=s.label)
        tightest = data.tightest[s.role]
        if tightest is not None:
            axes.plot([tightest], [100 * data.attainment], marker=MARKERS[s.role], color=colour(s.role))
    target_line(axes, data.attainment)
    axes.set(
        xscale="log",
        xlabel="SLO scale (tighter to the right)",
        ylim=(-3, 104),
        ylabel="SLO attainment (%)",
    )
    ticks = (4, 2, 1, 0.5, 0.25)
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_xlim(max(data.scales), min(data.scales))
    legend_above(axes, f"at {data.scale_rate:.3g} requests/s per device")


def target_line(axes: Any, attainment: float) -> None:
    """The dashed line of the target attainment."""
    axes.axhline(100 * attainment, color=colour("limit"), linestyle=(0, (4, 3)), linewidth=1)
