"""vLLM, vLLM++, DistServe-Low and DistServe-High side by side (paper, Fig. 11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distserve_planner.report.attainment_curves import AttainmentCurves, draw_rates
from distserve_planner.report.section import Panel, Section, missing, table
from distserve_planner.report.style import colour

TITLE, PAPER = "Ablation", "Fig. 11"
PAPER_ORDER = ("high", "low", "best", "vllm")


@dataclass(frozen=True)
class Bar:
    """One system of the ablation; goodput in requests/s per device."""

    role: str
    label: str
    deployment: str
    goodput: float


@dataclass(frozen=True)
class Ablation:
    """In the paper's order, best first. `follows_paper`: High >= Low > vLLM++ >= vLLM holds here too."""

    bars: tuple[Bar, ...]
    follows_paper: bool


def ablation(curves: AttainmentCurves, tolerance: float = 0.03) -> Ablation:
    """tolerance: relative difference of goodputs that counts as equal (the grid of rates and the noise)."""
    found = [s for role in PAPER_ORDER if (s := curves.of(role)) is not None]
    bars = tuple(Bar(s.role, s.label, s.deployment, s.goodput) for s in found)
    goodput = {bar.role: bar.goodput for bar in bars}
    complete = len(bars) == len(PAPER_ORDER)
    follows = (
        complete
        and goodput["high"] >= (1 - tolerance) * goodput["low"]
        and goodput["low"] > (1 + tolerance) * goodput["best"]
        and goodput["best"] >= (1 - tolerance) * goodput["vllm"]
    )
    return Ablation(bars, follows)


def ablation_section(data: Ablation, curves: AttainmentCurves) -> Section:
    """The section of the page."""
    if not data.bars:
        return missing("ablation", TITLE, PAPER, "none of the four systems meets the objectives")
    vllm = next((bar.goodput for bar in data.bars if bar.role == "vllm"), 0.0)
    order = " > ".join(bar.label for bar in sorted(data.bars, key=lambda b: -b.goodput))
    reading = (
        "The same attainment curves for four systems, and their goodput. vLLM has its usual parallelism, "
        "vLLM++ the best of all colocated ones, DistServe-Low keeps matching stages on one node, "
        f"DistServe-High may place any instance anywhere. Here: {order}. "
    )
    if data.follows_paper:
        reading += "The paper has the same order (High ≥ Low > vLLM++ = vLLM)."
    else:
        reading += (
            "The paper's order for OPT-66B is High ≥ Low > vLLM++ = vLLM; where this differs, the table of "
            "placements above says which objective or resource limits each."
        )
    bars = curves_of(data, curves)
    return Section(
        "ablation",
        TITLE,
        PAPER,
        reading,
        "Predicted by simulation; the paper's DistServe-High is simulated too.",
        data,
        (
            Panel(
                "rate", lambda axes: draw_rates(axes, curves, bars), "Attainment against rate, four systems"
            ),
            Panel("goodput", lambda axes: _draw_bars(axes, data, vllm), "Goodput of the four systems"),
        ),
        table(
            ("system", "placement", "goodput, req/s/device"),
            [(bar.label, bar.deployment, f"{bar.goodput:.3g}") for bar in data.bars],
        ),
    )


def curves_of(data: Ablation, curves: AttainmentCurves) -> tuple[Any, ...]:
    """The swept systems of the ablation, in its order."""
    return tuple(s for bar in data.bars if (s := curves.of(bar.role)) is not None)


def _draw_bars(axes: Any, data: Ablation, vllm: float) -> None:
    bars = data.bars[::-1]
    axes.barh(range(len(bars)), [b.goodput for b in bars], color=[colour(b.role) for b in bars], height=0.62)
    for i, bar in enumerate(bars):
        ratio = f"  ({bar.goodput / vllm:.2f}×)" if vllm else ""
        axes.annotate(
            f"{bar.goodput:.3g}{ratio}" if bar.goodput else "at no rate", (bar.goodput, i), xytext=(5, 0),
            textcoords="offset points", va="center", color=colour("ink"), fontsize=9,
        )  # fmt: skip
    axes.set_yticks(range(len(bars)), [b.label for b in bars])
    axes.set(
        xlabel="goodput (requests/s per device)",
        xlim=(0, 1.35 * max(b.goodput for b in bars)),
        title="goodput" + (" (× vLLM)" if vllm else ""),
    )
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", labelcolor=colour("ink"))
