"""Pictures of runs: attainment against rate and against SLO scale, stage breakdown, distributions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distserve_planner.slo import Slo
from distserve_tools.load.record import STAGES, Record

SCALES = np.geomspace(0.25, 4.0, 33)


def attainment_at_scale(records: Sequence[Record], slo: Slo, scale: float) -> float:
    """Share of requests within both objectives times `scale`."""
    scaled = slo.scaled(scale)
    return float(np.mean([r.met(scaled) for r in records]))


def plot_runs(runs: Mapping[str, Mapping[float, Sequence[Record]]], slo: Slo, folder: Path) -> list[Path]:
    """Draws `runs[system][rate]` as PNG files into `folder`; returns their paths.

    Needs matplotlib (extra `bench`).
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "attainment_rate": _attainment_over_rate,
        "attainment_scale": _attainment_over_scale,
        "stages": _stages,
        "latency_cdf": _cdf,
    }
    paths = []
    for name, draw in figures.items():
        figure = draw(plt, runs, slo)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120, bbox_inches="tight")
        plt.close(figure)
    return paths


def _attainment_over_rate(plt: Any, runs: Mapping[str, Mapping[float, Sequence[Record]]], slo: Slo) -> Any:
    figure, axes = plt.subplots(figsize=(6, 4))
    for system, by_rate in runs.items():
        rates = sorted(by_rate)
        shares = [100 * attainment_at_scale(by_rate[rate], slo, 1.0) for rate in rates]
        axes.plot(rates, shares, marker="o", label=system)
    axes.axhline(100 * slo.attainment, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="rate (requests/s)", ylabel="SLO attainment (%)", ylim=(0, 102))
    axes.legend()
    return figure


def _attainment_over_scale(plt: Any, runs: Mapping[str, Mapping[float, Sequence[Record]]], slo: Slo) -> Any:
    figure, axes = plt.subplots(figsize=(6, 4))
    for system, by_rate in runs.items():
        rate = sorted(by_rate)[len(by_rate) // 2]
        shares = [100 * attainment_at_scale(by_rate[rate], slo, scale) for scale in SCALES]
        axes.plot(SCALES, shares, label=f"{system} at {rate:g}/s")
    axes.axhline(100 * slo.attainment, color="grey", linestyle="--", linewidth=1)
    axes.set(
        xlabel="SLO scale (smaller is tighter)", ylabel="SLO attainment (%)", xscale="log", ylim=(0, 102)
    )
    axes.invert_xaxis()
    axes.legend()
    return figure


def _stages(plt: Any, runs: Mapping[str, Mapping[float, Sequence[Record]]], slo: Slo) -> Any:
    figure, axes = plt.subplots(figsize=(7, 4))
    labels, shares = [], []
    for system, by_rate in runs.items():
        for rate in sorted(by_rate):
            sums = [sum(r.stages.get(s, 0.0) for r in by_rate[rate] if r.ok) for s in STAGES]
            if sum(sums) > 0:
                labels.append(f"{system}\n{rate:g}/s")
                shares.append([100 * s / sum(sums) for s in sums])
    bottom = np.zeros(len(labels))
    for i, stage in enumerate(STAGES):
        heights = np.array([row[i] for row in shares]) if shares else bottom
        axes.bar(labels, heights, bottom=bottom, label=stage.replace("_", " "))
        bottom = bottom + heights
    axes.set(ylabel="share of time (%)")
    axes.tick_params(axis="x", labelsize=7)
    axes.legend(fontsize=7)
    return figure


def _cdf(plt: Any, runs: Mapping[str, Mapping[float, Sequence[Record]]], slo: Slo) -> Any:
    figure, panels = plt.subplots(1, 3, figsize=(13, 4))
    measures: tuple[tuple[str, Callable[[Record], list[float]], float], ...] = (
        ("TTFT", lambda r: [r.ttft_s], slo.ttft_s),
        ("TPOT", lambda r: [r.tpot_s], slo.tpot_s),
        ("ITL", lambda r: r.gaps_s, slo.tpot_s),
    )
    for axes, (name, values_of, objective) in zip(panels, measures, strict=True):
        for system, by_rate in runs.items():
            for rate in sorted(by_rate):
                values = np.sort([value for r in by_rate[rate] if r.ok for value in values_of(r)])
                axes.plot(values, np.linspace(0, 1, len(values)), label=f"{system} {rate:g}/s", linewidth=1)
        axes.axvline(objective, color="grey", linestyle="--", linewidth=1)
        axes.set(xlabel=f"{name} (s)", ylabel="share of messages" if name == "ITL" else "share of requests")
    panels[-1].legend(fontsize=6)
    return figure
