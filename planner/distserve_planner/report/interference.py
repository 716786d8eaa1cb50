"""What colocation costs: Fig. 1 (rates within the objectives) and Fig. 2 (a prompt beside decodes)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from distserve.core.shapes import Shape
from distserve_planner.report.attainment_curves import crossing
from distserve_planner.report.effort import Effort
from distserve_planner.report.parallel import map_tasks
from distserve_planner.report.points import outcome_at
from distserve_planner.report.section import Panel, Section, table
from distserve_planner.report.style import colour
from distserve_planner.report.systems import Case, smallest_shape
from distserve_planner.report.text import Done
from distserve_planner.search.bounds import decode_ceiling, prefill_ceiling
from distserve_planner.search.problem import Problem
from distserve_planner.simulator.spec import InstanceSpec, SystemSpec
from distserve_planner.slo import percentile, seconds

PROMPTS = (128, 1024)  # the paper's, beside decodes
MOST_BATCH = 256


@dataclass(frozen=True)
class Latencies:
    """One percentile of one system against requests/s; limit: where it leaves the objective."""

    name: str
    rates: tuple[float, ...]
    values_s: tuple[float, ...]
    limit: float | None


@dataclass(frozen=True)
class Interference:
    """TTFT and TPOT at percentile `share` of one instance of `shape` that serves both phases, or only one."""

    shape: str
    share: float
    ttft_slo_s: float
    tpot_slo_s: float
    ttft: tuple[Latencies, ...]
    tpot: tuple[Latencies, ...]


@dataclass(frozen=True)
class Beside:
    """Seconds of one step against decoding requests: alone, with a prompt, and the prompt alone."""

    prompt_tokens: int
    context: int
    batches: tuple[int, ...]
    decode_s: tuple[float, ...]
    mixed_s: tuple[float, ...]
    prefill_s: float


def interference(case: Case, effort: Effort, done: Done | None = None) -> Interference:
    """Simulates the smallest instance colocated (prefill first), and each phase alone."""
    problem = case.problem
    shape = smallest_shape(case.result.shapes.fitting)
    spec, both = problem.instance(shape), problem.instance(shape, unified=True)
    prefill_most, decode_most = prefill_ceiling(problem, spec), decode_ceiling(problem, spec)
    both_most = 1 / (1 / prefill_ceiling(problem, both) + 1 / decode_ceiling(problem, both))
    count = effort.curve_points
    kinds = (("prefill", 1.02 * prefill_most), ("decode", 1.02 * decode_most), ("unified", 1.15 * both_most))
    tasks = [(kind, float(r)) for kind, most in kinds for r in np.linspace(0.08 * most, most, count)]
    run = partial(_latencies_at, problem, shape, effort.curve_requests)
    points = dict(zip(tasks, map_tasks(run, tasks, case.jobs, done), strict=True))
    slo = problem.slo

    def latencies(name: str, kind: str, index: int, objective: float) -> Latencies:
        rates = [rate for k, rate in tasks if k == kind]
        values = [points[kind, rate][index] for rate in rates]
        return Latencies(name, tuple(rates), tuple(values), leaves(rates, values, objective))

    return Interference(
        f"tp {shape.tp}, pp {shape.pp}",
        slo.attainment,
        slo.ttft_s,
        slo.tpot_s,
        (
            latencies("both phases", "unified", 0, slo.ttft_s),
            latencies("prefill only", "prefill", 0, slo.ttft_s),
        ),
        (
            latencies("both phases", "unified", 1, slo.tpot_s),
            latencies("decode only", "decode", 1, slo.tpot_s),
        ),
    )


def _latencies_at(problem: Problem, shape: Shape, count: int, task: tuple[str, float]) -> tuple[float, float]:
    """TTFT and TPOT percentile at a rate."""
    kind, rate = task
    spec = problem.instance(shape, unified=kind == "unified")
    system = _alone(kind, spec)
    outcome = outcome_at(problem, system, rate, count)
    share = problem.slo.attainment
    return percentile(outcome.ttft_s, share), percentile(outcome.tpot_s, share)


def _alone(kind: str, spec: InstanceSpec) -> SystemSpec:
    if kind == "unified":
        return SystemSpec(unified=(spec,))
    return SystemSpec(prefill=(spec,)) if kind == "prefill" else SystemSpec(decode=(spec,))


def leaves(rates: Sequence[float], values: Sequence[float], objective: float) -> float | None:
    """The rate up to which `values` stay within `objective`, linear in between; None if they never do.

    The last rate if they always do.
    """
    inside = tuple(1.0 if v <= objective else 0.0 for v in values)
    if not inside[0]:
        return None
    if all(inside):
        return rates[-1]
    first = inside.index(0.0)
    pair = (values[first - 1], values[first])
    return crossing((rates[first - 1], rates[first]), pair, objective)


def beside(problem: Problem, shape: Shape) -> tuple[Beside, ...]:
    """Closed forms of the latency model for one prompt that joins a decode step, at the mean context."""
    spec = problem.instance(shape, unified=True)
    latency = spec.latency
    requests = problem.requests
    context = round(requests.mean_input + requests.mean_output / 2)
    most = max(2, min(MOST_BATCH, spec.kv_tokens // context))
    batches = tuple(sorted({int(b) for b in np.linspace(1, most, 40)}))
    figures = []
    for prompt in PROMPTS:
        tokens = min(prompt, problem.model.max_context)
        square = tokens * tokens
        figures.append(
            Beside(
                tokens,
                context,
                batches,
                tuple(latency.decode_stage_s(b, b * context) for b in batches),
                tuple(latency.mixed_stage_s(tokens, square, b, b * context) for b in batches),
                latency.prefill_stage_s(tokens, square, 1),
            )
        )
    return tuple(figures)


def interference_sections(case: Case, effort: Effort, done: Done | None = None) -> list[Section]:
    """Sections of Fig. 1 and Fig. 2."""
    data = interference(case, effort, done)
    steps = beside(case.problem, smallest_shape(case.result.shapes.fitting))
    return [_rates_section(data), _steps_section(steps, data.shape)]


def _rates_section(data: Interference) -> Section:
    name = f"P{100 * data.share:g}"
    both = _least(data.ttft[0].limit, data.tpot[0].limit)
    prefill, decode = data.ttft[1].limit or 0.0, data.tpot[1].limit or 0.0
    reading = (
        f"One instance ({data.shape}) that serves both phases keeps {name} TTFT and TPOT within the "
        f"objectives {_up_to(both)}; with prefill only {_up_to(prefill)}, with decode only {_up_to(decode)}. "
    )
    if both > 0 and prefill > 0 and decode > 0:
        ideal = 1 / (1 / prefill + 1 / decode)
        reading += (
            f"Split in the ratio of these rates, each device would serve {ideal:.3g} requests/s on average, "
            f"{ideal / both:.2f} times as many: what there is to gain from serving the phases apart, before "
            "whole devices and transfers take their share."
        )
    return Section(
        "interference",
        "What each phase could do alone",
        "Fig. 1",
        reading,
        "Predicted by simulation with this workload's lengths (the paper: 512 in, 64 out); each objective "
        f"by itself at {name}. Colocated: prefill first, as vLLM.",
        data,
        (
            Panel(
                "ttft",
                lambda axes: _draw_rates(axes, data.ttft, data.ttft_slo_s, f"{name} TTFT"),
                "TTFT against rate, colocated and prefill only",
            ),
            Panel(
                "tpot",
                lambda axes: _draw_rates(axes, data.tpot, data.tpot_slo_s, f"{name} TPOT"),
                "TPOT against rate, colocated and decode only",
            ),
        ),
        table(
            ("system", "objective", "kept up to, requests/s"),
            [
                (line.name, objective, "no rate" if line.limit is None else f"{line.limit:.3g}")
                for objective, lines in (("TTFT", data.ttft), ("TPOT", data.tpot))
                for line in lines
            ],
        ),
    )


def _up_to(rate: float) -> str:
    return f"up to {rate:.3g} requests/s" if rate > 0 else "at no rate"


def _least(*limits: float | None) -> float:
    return min(limit or 0.0 for limit in limits)


def _draw_rates(axes: Any, lines: tuple[Latencies, ...], objective: float, name: str) -> None:
    top = 6 * objective
    for line, role, marker in zip(lines, ("best", "high"), ("^", "o"), strict=True):
        shown = [1000 * v if v <= 30 * top else np.nan for v in line.values_s]
        axes.plot(line.rates, shown, color=colour(role), marker=marker, label=line.name)
        if line.limit is not None:
            axes.plot(
                [line.limit] * 2, [0, 1000 * objective], color=colour(role), linestyle=":", linewidth=1.2
            )
    axes.axhline(1000 * objective, color=colour("limit"), linestyle=(0, (4, 3)), linewidth=1)
    lowest = min(v for line in lines for v in line.values_s)
    axes.set(
        yscale="log", xlabel="rate (requests/s)", ylabel=f"{name} (ms)",
        title=f"{name}, objective {seconds(objective)}",
        ylim=(700 * min(lowest, objective), 1000 * top),
    )  # fmt: skip
    plain_log_ticks(axes)
    seen = [r for line in lines for r, v in zip(line.rates, line.values_s, strict=True) if v <= top]
    axes.set_xlim(0, 1.15 * max(seen, default=lines[-1].rates[-1]))
    axes.legend(loc="lower right")


def plain_log_ticks(axes: Any) -> None:
    """Tick labels 20, 50, 100 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _steps_section(steps: tuple[Beside, ...], shape: str) -> Section:
    long = steps[-1]
    last = len(long.batches) - 1
    slowdown = long.mixed_s[last] / long.decode_s[last]
    reading = (
        f"One step of an instance ({shape}) as decoding requests of {long.context} tokens are added. A "
        f"prompt of {long.prompt_tokens} tokens in the same step makes all {long.batches[last]} requests "
        f"wait {slowdown:.1f} times as long for their next token, and it waits for them: both phases lose. "
        "A long prompt costs more than a short one."
    )
    rows = [
        (
            str(s.prompt_tokens),
            str(s.batches[i]),
            seconds(s.decode_s[i]),
            seconds(s.mixed_s[i]),
            seconds(s.prefill_s),
        )
        for s in steps
        for i in sorted({0, len(s.batches) // 2, len(s.batches) - 1})
    ]
    return Section(
        "steps",
        "A prompt beside decodes",
        "Fig. 2",
        reading,
        "Computed from the latency model; the mixed step is its extension for chunked prefill (one read of "
        "the weights, the products of prompt and decode tokens, both attentions).",
        steps,
        tuple(
            Panel(
                f"prompt{s.prompt_tokens}",
                partial(_draw_step, data=s),
                f"Step time, prompt of {s.prompt_tokens}",
            )
            for s in steps
        ),
        table(("prompt", "decoding", "decode only", "with the prompt", "prompt alone"), rows),
    )


def _draw_step(axes: Any, data: Beside) -> None:
    axes.plot(
        data.batches, [1000 * t for t in data.mixed_s], color=colour("best"), label="decode + one prompt"
    )
    axes.plot(data.batches, [1000 * t for t in data.decode_s], color=colour("high"), label="decode only")
    axes.axhline(1000 * data.prefill_s, color=colour("muted"), linestyle=":", label="prompt only")
    axes.fill_between(
        data.batches, [1000 * t for t in data.decode_s], [1000 * t for t in data.mixed_s],
        color=colour("best"), alpha=0.12, linewidth=0,
    )  # fmt: skip
    top = 1000 * max(max(data.mixed_s), data.prefill_s)
    axes.set(
        xlabel="decoding requests in the step", ylabel="step (ms)", ylim=(0, 1.35 * top),
        title=f"prompt of {data.prompt_tokens} tokens",
    )  # fmt: skip
    axes.set_xlim(left=0)
    axes.legend(loc="upper left")
