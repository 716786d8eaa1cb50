"""Throughput of each phase against length and batch, with `Lm` (paper, Fig. 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from distserve_planner.report.section import Panel, Section, table
from distserve_planner.report.style import colour
from distserve_planner.report.systems import smallest_shape
from distserve_planner.search.problem import Problem
from distserve_planner.simulator.rounds import DecodeRounds

BATCHES = (1, 2, 4, 8)
LENGTH_STEP = 16  # tokens; `Lm` is a multiple of it
SATURATED = 0.95
MOST_BATCH = 256


@dataclass(frozen=True)
class PrefillCurve:
    """prompts in a batch, all of one length; tokens/s at each of the lengths."""

    batch: int
    tokens_s: tuple[float, ...]


@dataclass(frozen=True)
class DecodeCurve:
    """context tokens of each request; tokens/s at each of the batch sizes (nan beyond KV memory)."""

    context: int
    tokens_s: tuple[float, ...]


@dataclass(frozen=True)
class Throughput:
    """Of one instance of `shape`.

    lm_tokens: shortest prompt with 95 % of the best prefill tokens/s, as the planner uses it. best_tokens_s:
    of a lone prompt of any length. tpot_batch: largest batch at the mean context with a round within the TPOT
    objective, 0 if none; tpot_limits: whether a larger one would have room.
    """

    shape: str
    lengths: tuple[int, ...]
    prefill: tuple[PrefillCurve, ...]
    lm_tokens: int
    best_tokens_s: float
    lm_measured: bool
    batches: tuple[int, ...]
    decode: tuple[DecodeCurve, ...]
    mean_context: int
    tpot_batch: int
    tpot_limits: bool
    predicted: bool


def throughput(problem: Problem, shape: Any) -> Throughput:
    """Closed forms of the latency model; nothing is simulated."""
    spec = problem.instance(shape)
    latency = spec.latency
    longest = min(problem.model.max_context, max(2048, 2 * latency.lm_tokens))
    lengths = tuple(range(LENGTH_STEP, longest + 1, LENGTH_STEP))

    def prefill_rate(batch: int, length: int) -> float:
        return batch * length / latency.prefill_stage_s(batch * length, batch * length * length, batch)

    curves = tuple(PrefillCurve(b, tuple(prefill_rate(b, n) for n in lengths)) for b in BATCHES)
    requests = problem.requests
    mean_context = round(requests.mean_input + requests.mean_output / 2)
    rounds = DecodeRounds(latency)
    rounds.grow(MOST_BATCH)

    def round_s(batch: int, context: int) -> float:
        return rounds.fixed[batch] + rounds.slope[batch] * batch * context

    sizes = tuple(range(1, MOST_BATCH + 1))
    contexts = sorted({128, 512, mean_context})
    decode = tuple(
        DecodeCurve(c, tuple(b / round_s(b, c) if b * c <= spec.kv_tokens else float("nan") for b in sizes))
        for c in contexts
    )
    most = min(MOST_BATCH, spec.kv_tokens // mean_context)
    within = [b for b in range(1, most + 1) if round_s(b, mean_context) <= problem.slo.tpot_s]
    source = problem.latency
    measured = source.lm_tokens is not None and shape.tp == min(d.tp for d in source.degrees)
    return Throughput(
        f"tp {shape.tp}, pp {shape.pp}", lengths, curves, latency.lm_tokens, max(curves[0].tokens_s),
        measured, sizes, decode, mean_context, max(within, default=0), len(within) < most, latency.predicted,
    )  # fmt: skip


def throughput_section(problem: Problem, fitting: Any) -> Section:
    """The section of the page, for the smallest instance."""
    data = throughput(problem, smallest_shape(fitting))
    slo = problem.slo
    objective = f"the TPOT objective of {1000 * slo.tpot_s:.3g} ms"
    if data.tpot_batch and data.tpot_limits:
        limit = f"rounds of up to {data.tpot_batch} requests stay within {objective}"
    elif data.tpot_batch:
        limit = f"even {data.tpot_batch} requests, the largest batch here, stay within {objective}"
    else:
        limit = f"no batch stays within {objective}"
    reading = (
        f"One instance ({data.shape}). Prefill is bound by compute: at Lm = {data.lm_tokens} tokens a "
        "single prompt already reaches 95 % of the best rate, so batching prompts longer than that only "
        "makes all of them wait. Decode is bound by memory reads, so it gains from every further request "
        f"in the batch; with contexts of {data.mean_context} tokens, the mean here, {limit}. Curves end "
        "where KV memory is full."
    )
    how = "measured with the profile" if data.lm_measured else "derived from the latency model"
    basis = f"Computed from the latency model ({problem.latency.source or problem.latency.device}); Lm {how}."
    if data.predicted:
        basis += " This degree of parallelism is itself predicted, not measured."
    return Section(
        "throughput",
        "Throughput against length and batch",
        "Fig. 3",
        reading,
        basis,
        data,
        (
            Panel(
                "prefill", lambda axes: _draw_prefill(axes, data), "Prefill tokens per second against length"
            ),
            Panel(
                "decode", lambda axes: _draw_decode(axes, data), "Decode tokens per second against batch size"
            ),
        ),
        table(
            ("prompt tokens", *(f"batch {c.batch}, tokens/s" for c in data.prefill)),
            [
                (str(n), *(f"{c.tokens_s[i]:.0f}" for c in data.prefill))
                for i, n in enumerate(data.lengths)
                if n in (64, 128, 256, 512, 1024, 2048) or n == data.lm_tokens
            ],
        ),
    )


def _draw_prefill(axes: Any, data: Throughput) -> None:
    for i, curve in enumerate(data.prefill):
        label = f"batch {curve.batch}"
        axes.plot(data.lengths, np.array(curve.tokens_s) / 1000, color=colour(f"shade{i + 1}"), label=label)
    axes.axhline(
        SATURATED * data.best_tokens_s / 1000, color=colour("limit"), linestyle=(0, (4, 3)), linewidth=1
    )
    index = min(range(len(data.lengths)), key=lambda i: abs(data.lengths[i] - data.lm_tokens))
    there = data.prefill[0].tokens_s[index] / 1000
    axes.plot([data.lm_tokens], [there], "o", color=colour("limit"))
    axes.annotate(
        f"Lm = {data.lm_tokens}\n(95 % of the best)", (data.lm_tokens, there), xytext=(8, -30),
        textcoords="offset points", color=colour("limit"), fontsize=9,
    )  # fmt: skip
    axes.set(xlabel="prompt tokens", ylabel="prefill (1000 tokens/s)", title="prefill")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")


def _draw_decode(axes: Any, data: Throughput) -> None:
    for i, curve in enumerate(data.decode):
        label = f"context {curve.context}" + (" (mean)" if curve.context == data.mean_context else "")
        rates = np.array(curve.tokens_s) / 1000
        axes.plot(data.batches, rates, color=colour(f"shade{i + 2}"), label=label)
        end = int(np.isfinite(rates).sum())
        if 0 < end < len(rates):
            axes.plot([data.batches[end - 1]], [rates[end - 1]], "|", color=colour("ink"), markersize=9)
        if curve.context == data.mean_context and data.tpot_batch and data.tpot_limits:
            there = rates[data.tpot_batch - 1]
            axes.plot([data.tpot_batch], [there], "o", color=colour("limit"))
            side = "right" if data.tpot_batch > 0.6 * MOST_BATCH else "left"
            axes.annotate(
                f"TPOT objective at {data.tpot_batch}", (data.tpot_batch, there), xytext=(6, -14), ha=side,
                textcoords="offset points", color=colour("limit"), fontsize=9,
            )  # fmt: skip
    axes.set(xlabel="requests in the batch", ylabel="decode (1000 tokens/s)", title="decode")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.4 * max(np.nanmax(curve.tokens_s) for curve in data.decode) / 1000)
    axes.legend(loc="upper left")
