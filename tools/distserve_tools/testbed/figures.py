"""Pictures of a campaign, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distserve_tools.load.plots import SCALES
from distserve_tools.load.record import STAGES
from distserve_tools.testbed.campaign import Campaign
from distserve_tools.testbed.comparison import pairs
from distserve_tools.testbed.runs import Run

DPI = 90


def draw(campaign: Campaign, folder: Path, prefix: str) -> list[Path]:
    """Writes `<prefix>-*.png` into `folder`; returns the paths. Needs matplotlib (extra `bench`)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    drawings = {
        "attainment": _attainment,
        "slo-scale": _slo_scale,
        "breakdown": _breakdown,
        "latency": _latency,
    }
    paths = []
    for name, function in drawings.items():
        figure = function(plt, campaign)
        paths.append(folder / f"{prefix}-{name}.png")
        figure.savefig(paths[-1], dpi=DPI, bbox_inches="tight")
        plt.close(figure)
    return paths


def _attainment(plt: Any, campaign: Campaign) -> Any:
    """Measured (full) and simulated (dashed), one panel per objective."""
    labels = list(campaign.slos)
    figure, panels = plt.subplots(1, len(labels), figsize=(4 * len(labels), 3.4), sharey=True, squeeze=False)
    for axes, label in zip(panels[0], labels, strict=True):
        for i, system in enumerate(campaign.systems):
            points = pairs(campaign.runs, system, campaign.slos[label])
            rates = [p.rate_rps / 2 for p in points]
            axes.plot(rates, [100 * p.measured for p in points], marker="o", color=f"C{i}", label=system)
            predicted = [p.predicted for p in points]
            if all(p is not None for p in predicted):
                axes.plot(rates, [100 * float(p or 0) for p in predicted], "--", color=f"C{i}", linewidth=1)
        axes.axhline(90, color="grey", linestyle=":", linewidth=1)
        axes.set(title=label, xlabel="requests/s per core", ylim=(0, 103))
    panels[0][0].set_ylabel("SLO attainment (%)")
    panels[0][-1].legend(fontsize=8)
    return figure


def _slo_scale(plt: Any, campaign: Campaign) -> Any:
    figure, axes = plt.subplots(figsize=(5.5, 3.6))
    for system in campaign.systems:
        runs = _at(campaign, system, campaign.repeated_rate)
        shares = [
            100 * float(np.mean([run.attainment(campaign.main.scaled(s)) for run in runs])) for s in SCALES
        ]
        axes.plot(SCALES, shares, label=system)
    axes.axhline(90, color="grey", linestyle=":", linewidth=1)
    axes.set(
        xlabel=f"SLO scale at {campaign.repeated_rate:g} requests/s (right is tighter)",
        ylabel="SLO attainment (%)",
        xscale="log",
        ylim=(0, 103),
    )
    axes.invert_xaxis()
    axes.legend(fontsize=8)
    return figure


def _breakdown(plt: Any, campaign: Campaign) -> Any:
    figure, axes = plt.subplots(figsize=(7, 3.6))
    names, rows = [], []
    for system in campaign.systems:
        for rate in campaign.rates[:: max(1, len(campaign.rates) // 3)]:
            runs = _at(campaign, system, rate)
            means = [float(np.mean([run.stage_means()[s] for run in runs])) for s in STAGES] if runs else []
            if sum(means):
                names.append(f"{system}\n{rate:g}/s")
                rows.append([100 * m / sum(means) for m in means])
    bottom = np.zeros(len(names))
    for i, stage in enumerate(STAGES):
        heights = np.array([row[i] for row in rows]) if rows else bottom
        axes.bar(names, heights, bottom=bottom, label=stage.replace("_", " "))
        bottom = bottom + heights
    axes.set(ylabel="share of end to end (%)")
    axes.tick_params(axis="x", labelsize=6)
    axes.legend(fontsize=7)
    return figure


def _latency(plt: Any, campaign: Campaign) -> Any:
    """Distributions at the middle rate, measured (full) and simulated (dashed)."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4))
    slo = campaign.main
    for axes, name, limit in zip(panels, ("ttft_s", "tpot_s"), (slo.ttft_s, slo.tpot_s), strict=True):
        for i, system in enumerate(campaign.systems):
            runs = _at(campaign, system, campaign.repeated_rate)
            _cdf(axes, [getattr(r, name) for run in runs for r in run.records if r.ok], f"C{i}", "-", system)
            if all(run.predicted is not None for run in runs):
                _cdf(axes, [v for run in runs for v in getattr(run.predicted, name)], f"C{i}", "--", None)
        axes.axvline(limit, color="grey", linestyle=":", linewidth=1)
        axes.set(xlabel=f"{name[:4].upper()} (s)", ylabel="share of requests", xlim=(0, 3 * limit))
    panels[1].legend(fontsize=8)
    return figure


def _cdf(axes: Any, values: Sequence[float], color: str, style: str, label: str | None) -> None:
    ordered = np.sort(np.asarray(values))
    axes.plot(ordered, np.linspace(0, 1, len(ordered)), style, color=color, label=label, linewidth=1.2)


def _at(campaign: Campaign, system: str, rate: float) -> list[Run]:
    return [run for run in campaign.runs if run.system == system and run.rate_rps == rate]
