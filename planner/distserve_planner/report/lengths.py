"""Distribution of prompt and answer lengths (paper, Fig. 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distserve_planner.report.section import Panel, Section, table
from distserve_planner.report.style import colour

BINS = 40


@dataclass(frozen=True)
class Histogram:
    """edges: tokens, one more than `shares`, which sum to 1."""

    edges: tuple[float, ...]
    shares: tuple[float, ...]
    mean: float
    p50: float
    p99: float
    max: int


@dataclass(frozen=True)
class Lengths:
    workload: str
    requests: int
    input: Histogram
    output: Histogram


def lengths(workload: str, inputs: Sequence[int], outputs: Sequence[int]) -> Lengths:
    """Of the requests that every figure of the report is made with."""
    return Lengths(workload, len(inputs), _histogram(inputs), _histogram(outputs))


def _histogram(values: Sequence[int]) -> Histogram:
    array = np.asarray(values, float)
    top = max(float(np.percentile(array, 99.5)), float(array.min()) + 1)
    counts, edges = np.histogram(np.minimum(array, top), bins=BINS, range=(0, top))
    p50, p99 = np.percentile(array, (50, 99))
    return Histogram(
        tuple(float(e) for e in edges),
        tuple(float(c) for c in counts / len(array)),
        float(array.mean()),
        float(p50),
        float(p99),
        int(array.max()),
    )


def lengths_section(data: Lengths) -> Section:
    """The section of the page."""
    reading = (
        f"{data.workload}: prompts of {data.input.mean:.1f} tokens on average and answers of "
        f"{data.output.mean:.1f}. Long prompts cost TTFT, long answers hold decode memory; the tails, not "
        "the means, decide a P90. The last bar holds everything beyond."
    )
    rows = [
        (name, f"{h.mean:.1f}", f"{h.p50:.0f}", f"{h.p99:.0f}", str(h.max))
        for name, h in (("input", data.input), ("output", data.output))
    ]
    return Section(
        "lengths",
        "Input and output lengths",
        "Fig. 7",
        reading,
        f"{data.requests} requests resampled from the workload; every figure here is made with them.",
        data,
        (
            Panel(
                "input",
                lambda axes: _draw(axes, data.input, "input", "shade3"),
                "Histogram of prompt lengths",
            ),
            Panel(
                "output",
                lambda axes: _draw(axes, data.output, "output", "stage4"),
                "Histogram of answer lengths",
            ),
        ),
        table(("tokens", "mean", "p50", "p99", "max"), rows),
    )


def _draw(axes: Any, data: Histogram, name: str, role: str) -> None:
    edges = np.array(data.edges)
    axes.bar(
        edges[:-1], 100 * np.array(data.shares), width=np.diff(edges), align="edge", color=colour(role),
        edgecolor=colour("paper"), linewidth=0.4,
    )  # fmt: skip
    axes.axvline(data.mean, color=colour("limit"), linestyle=(0, (4, 3)), linewidth=1.2)
    late = data.mean > 0.6 * edges[-1]
    axes.annotate(
        f"mean {data.mean:.1f}", (data.mean, 0.97), xytext=(-5 if late else 5, 0), textcoords="offset points",
        xycoords=axes.get_xaxis_transform(), color=colour("limit"), va="top", ha="right" if late else "left",
        fontsize=9,
    )  # fmt: skip
    axes.set(xlabel=f"{name} tokens", ylabel="requests (%)", title=f"{name} length", xlim=(0, edges[-1]))
