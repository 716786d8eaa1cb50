"""Tensor against pipeline parallelism for prefill, and the effect of K (paper, Fig. 4, Eq. 1 to 3)."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from distserve.core.parsing import ConfigError
from distserve.core.scheduler import Limits
from distserve.core.shapes import Shape
from distserve_planner.queueing import (
    crossover_rate,
    md1_ttft_s,
    pipeline_ttft_s,
    two_way_pipeline_ttft_s,
    two_way_tensor_ttft_s,
)
from distserve_planner.report.effort import Effort
from distserve_planner.report.section import Panel, Section, missing, table
from distserve_planner.report.style import colour
from distserve_planner.search.candidates import tp_degrees
from distserve_planner.search.problem import Problem
from distserve_planner.simulator.spec import InstanceSpec, SystemSpec
from distserve_planner.simulator.system import Simulation
from distserve_planner.slo import seconds

TITLE, PAPER = "Prefill: tensor against pipeline parallelism", "Fig. 4, Eq. 1 to 3"
PROMPT = 512
SPEEDUPS = (1.3, 1.5, 1.7, 1.9)
LINE = 120
DOTS = 6
DRAWN = 8.0  # times D; above it a queue is as good as full


@dataclass(frozen=True)
class KCurve:
    """Eq. 3 for one K, in units of D: mean TTFT at each load R D; crossover: load at which Eq. 2 meets it."""

    speedup: float
    ttft: tuple[float, ...]
    crossover: float | None


@dataclass(frozen=True)
class Crossover:
    """Mean TTFT in seconds against requests/s, for prompts of `prompt_tokens` on two devices.

    service_s: D, one prompt on one device. speedup: K = D over its time with tp = 2. pipeline_total_s and
    pipeline_stage_s: Ds and Dm of pp = 2. crossover: rate above which pp = 2 is better, None if at none.
    simulated_*: the same from the simulator. loads: R D of the K curves, whose pipeline is Eq. 2.
    """

    prompt_tokens: int
    service_s: float
    speedup: float
    pipeline_total_s: float
    pipeline_stage_s: float
    rates: tuple[float, ...]
    one_device_s: tuple[float, ...]
    tensor_s: tuple[float, ...]
    pipeline_s: tuple[float, ...]
    crossover: float | None
    simulated_rates: tuple[float, ...]
    simulated_tensor_s: tuple[float, ...]
    simulated_pipeline_s: tuple[float, ...]
    loads: tuple[float, ...]
    pipeline_ttft: tuple[float, ...]
    effects: tuple[KCurve, ...]
    predicted: bool


def crossover(problem: Problem, effort: Effort) -> Crossover:
    """Raises `ConfigError` if the model cannot be split in two."""
    if 2 not in tp_degrees(problem.model, 2, "all"):
        raise ConfigError(f"num_heads={problem.model.num_heads}: cannot be divided by tp=2")
    tokens = min(PROMPT, problem.model.max_context // 2)
    lone = _spec(problem, Shape(1, 1), tokens)
    tensor = _spec(problem, Shape(2, 1), tokens)
    pipeline = _spec(problem, Shape(1, 2), tokens)
    batch = (tokens, tokens * tokens, 1)
    service = lone.latency.prefill_total_s(*batch)
    tensor_s = tensor.latency.prefill_total_s(*batch)
    total, stage = pipeline.latency.prefill_total_s(*batch), pipeline.latency.prefill_stage_s(*batch)
    speedup = service / tensor_s
    rates = np.linspace(0, 0.97 / min(tensor_s, stage), LINE)
    dots = np.linspace(0.15, 0.8, DOTS) / max(tensor_s, stage)
    count = 8 * effort.curve_requests
    return Crossover(
        tokens, service, speedup, total, stage,
        tuple(float(r) for r in rates),
        tuple(md1_ttft_s(float(r), service) for r in rates),
        tuple(two_way_tensor_ttft_s(float(r), service, speedup) for r in rates),
        tuple(pipeline_ttft_s(float(r), total, stage) for r in rates),
        meeting_rate(service, speedup, total, stage),
        tuple(float(r) for r in dots),
        tuple(_simulated(tensor, tokens, float(r), count) for r in dots),
        tuple(_simulated(pipeline, tokens, float(r), count) for r in dots),
        *_effect_of_k(),
        lone.latency.predicted or tensor.latency.predicted,
    )  # fmt: skip


def _effect_of_k() -> tuple[tuple[float, ...], tuple[float, ...], tuple[KCurve, ...]]:
    """Closed forms with D = 1, so that they hold for every model: loads, Eq. 2, and Eq. 3 for each K."""
    loads = tuple(float(v) for v in np.linspace(0, 1.95, LINE))
    pipeline = tuple(two_way_pipeline_ttft_s(load, 1.0) for load in loads)
    effects = tuple(
        KCurve(k, tuple(two_way_tensor_ttft_s(load, 1.0, k) for load in loads), crossover_rate(1.0, k))
        for k in SPEEDUPS
    )
    return loads, pipeline, effects


def meeting_rate(service_s: float, speedup: float, total_s: float, stage_s: float) -> float | None:
    """Rate at which Eq. 3 rises above Eq. 2 with this case's Ds and Dm; 0 if it is above from the start."""

    def tensor_wins(rate: float) -> bool:
        return two_way_tensor_ttft_s(rate, service_s, speedup) < pipeline_ttft_s(rate, total_s, stage_s)

    if stage_s >= service_s / speedup:
        return None if tensor_wins(0.0) else 0.0  # the pipeline saturates first
    if not tensor_wins(0.0):
        return 0.0
    low, high = 0.0, speedup / service_s
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if tensor_wins(middle) else (low, middle)
    return high


def _spec(problem: Problem, shape: Shape, tokens: int) -> InstanceSpec:
    """An instance whose batches are one prompt each, with memory that is no limit."""
    latency = problem.latency.instance(shape.tp, shape.pp, stage_link=problem.cluster.intra)
    return InstanceSpec(latency, 1 << 20, Limits(max_batch_size=64, max_batch_tokens=tokens))


def _simulated(spec: InstanceSpec, tokens: int, rate: float, count: int) -> float:
    arrivals = np.cumsum(np.random.default_rng(0).standard_exponential(count)) / rate
    run = Simulation(SystemSpec(prefill=(spec,)), arrivals.tolist(), [tokens] * count, [1] * count)
    run.run()
    return float(run.outcome(count // 20).ttft_s.mean())


def crossover_section(problem: Problem, effort: Effort) -> Section:
    """The section of the page."""
    try:
        data = crossover(problem, effort)
    except ConfigError as error:
        return missing("crossover", TITLE, PAPER, f"this model cannot be split over two devices ({error})")
    if data.crossover is None:
        found = "tp = 2 is better at every rate"
    elif data.crossover == 0:
        found = "pp = 2 is better at every rate"
    else:
        found = f"up to {data.crossover:.3g} requests/s tp = 2 answers sooner, above that pp = 2"
    reading = (
        f"Mean TTFT of {data.prompt_tokens}-token prompts on two devices; one prompt takes D = "
        f"{seconds(data.service_s)} on one device, and tp = 2 makes it K = {data.speedup:.2f} times faster: "
        f"{found}. In general K decides: the worse tensor parallelism scales, the earlier the pipeline "
        "overtakes it (dots; at K = 2 it never does)."
    )
    basis = (
        "Lines: Eq. 1 to 3 with D, K, Ds and Dm from the latency model for this case (Ds includes the hop "
        "between stages); the idealised Eq. 2 and 3 for the effect of K. Dots: the simulator with one "
        "prompt per batch. The paper measured its Fig. 4a on A100s."
    )
    if data.predicted:
        basis += " One of the degrees is predicted from other degrees, not measured."
    return Section(
        "crossover",
        TITLE,
        PAPER,
        reading,
        basis,
        data,
        (
            Panel("case", lambda axes: _draw_case(axes, data), "Mean TTFT against rate with tp 2 and pp 2"),
            Panel("k", lambda axes: _draw_effects(axes, data), "Effect of the speed-up K on the crossover"),
        ),
        table(
            ("K", "pp overtakes at load R·D"),
            [
                (f"{e.speedup:g}", "never" if e.crossover is None else f"{e.crossover:.3f}")
                for e in data.effects
            ],
        ),
    )


def _draw_case(axes: Any, data: Crossover) -> None:
    top = 5 * data.service_s
    lines = (
        (data.one_device_s, "muted", ":", "one device (Eq. 1)"),
        (data.tensor_s, "best", "-", "tp = 2 (Eq. 3)"),
        (data.pipeline_s, "high", "-", "pp = 2 (Eq. 2)"),
    )
    for times, role, dash, label in lines:
        shown = [1000 * t if t <= 2 * top else np.nan for t in times]
        axes.plot(data.rates, shown, color=colour(role), linestyle=dash, label=label)
    for times, role in ((data.simulated_tensor_s, "best"), (data.simulated_pipeline_s, "high")):
        axes.plot(data.simulated_rates, [1000 * t for t in times], "o", color=colour(role), markersize=4)
    if data.crossover and isfinite(data.crossover):
        there = 1000 * pipeline_ttft_s(data.crossover, data.pipeline_total_s, data.pipeline_stage_s)
        axes.plot([data.crossover], [there], "D", color=colour("limit"), zorder=5)
        axes.annotate(
            f"{data.crossover:.3g}/s", (data.crossover, there), xytext=(-4, 9), ha="right",
            textcoords="offset points", color=colour("limit"), fontsize=9,
        )  # fmt: skip
    axes.set(xlabel="rate (requests/s on two devices)", ylabel="mean TTFT (ms)", ylim=(0, 1000 * top))
    axes.set_title(f"this case (K = {data.speedup:.2f}); dots simulated")
    axes.set_xlim(left=0)
    axes.legend(loc="upper left")


def _draw_effects(axes: Any, data: Crossover) -> None:
    def shown(values: tuple[float, ...]) -> list[float]:
        return [v if v <= DRAWN else np.nan for v in values]

    for i, effect in enumerate(data.effects):
        axes.plot(
            data.loads,
            shown(effect.ttft),
            color=colour(f"shade{i + 1}"),
            label=f"tp = 2, K = {effect.speedup:g}",
        )
    axes.plot(data.loads, shown(data.pipeline_ttft), color=colour("ink"), linestyle="--", label="pp = 2")
    for effect in data.effects:
        if effect.crossover:
            there = two_way_pipeline_ttft_s(effect.crossover, 1.0)
            axes.plot([effect.crossover], [there], "o", color=colour("limit"), zorder=5)
    axes.set(xlabel="load R·D", ylabel="mean TTFT (in units of D)", ylim=(0, 4), xlim=(0, 1.95))
    axes.set_title("effect of K")
    axes.legend(loc="upper left")
