"""Latency and throughput of decode under tensor and pipeline parallelism (paper, Fig. 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distserve_planner.report.section import Panel, Section, table
from distserve_planner.report.style import colour
from distserve_planner.search.candidates import tp_degrees
from distserve_planner.search.problem import Problem
from distserve_planner.slo import seconds

DEVICES = (1, 2, 4, 8)
BATCH, CONTEXT = 128, 256  # the paper's


@dataclass(frozen=True)
class Degrees:
    """One way to use more devices. tpot_s: of one round; tokens_s: of the instance."""

    devices: tuple[int, ...]
    tpot_s: tuple[float, ...]
    tokens_s: tuple[float, ...]
    predicted: tuple[bool, ...]


@dataclass(frozen=True)
class DecodeParallelism:
    """`batch` requests per micro-batch with `context` tokens each: as many micro-batches as stages."""

    batch: int
    context: int
    tensor: Degrees
    pipeline: Degrees


def decode_parallelism(problem: Problem, batch: int = BATCH, context: int = CONTEXT) -> DecodeParallelism:
    """Closed forms of the latency model. Degrees that do not divide the model are left out."""
    possible = tp_degrees(problem.model, DEVICES[-1], "all")
    tensor: list[tuple[int, float, float, bool]] = []
    pipeline: list[tuple[int, float, float, bool]] = []
    for devices in DEVICES:
        for found, tp, pp in ((tensor, devices, 1), (pipeline, 1, devices)):
            if tp not in possible or pp > problem.model.num_layers:
                continue
            latency = problem.latency.instance(tp, pp, stage_link=problem.cluster.intra)
            total = latency.decode_total_s(batch, batch * context)
            around = max(total, pp * latency.decode_stage_s(batch, batch * context))
            found.append((devices, around, pp * batch / around, latency.predicted))
    return DecodeParallelism(batch, context, _degrees(tensor), _degrees(pipeline))


def _degrees(rows: list[tuple[int, float, float, bool]]) -> Degrees:
    devices, tpot, tokens, predicted = zip(*rows, strict=True)
    return Degrees(devices, tpot, tokens, predicted)


def decode_parallelism_section(problem: Problem) -> Section:
    """The section of the page."""
    data = decode_parallelism(problem)
    tensor, pipeline = data.tensor, data.pipeline
    reading = (
        f"{data.batch} requests of {data.context} tokens per micro-batch. Tensor parallelism shortens a "
        f"round, to 1/{tensor.tpot_s[0] / tensor.tpot_s[-1]:.2f} on {tensor.devices[-1]} devices, with less "
        f"gain from each further one. Pipeline parallelism on {pipeline.devices[-1]} multiplies throughput "
        f"by {pipeline.tokens_s[-1] / pipeline.tokens_s[0]:.2f}, while a round takes "
        f"{pipeline.tpot_s[-1] / pipeline.tpot_s[0]:.2f} times as long: hops, and overheads that every "
        "stage has. So tensor parallelism first, until TPOT is met, then pipeline stages or replicas."
    )
    basis = "Computed from the latency model with the links of a node."
    if any(tensor.predicted):
        unmeasured = [str(d) for d, p in zip(tensor.devices, tensor.predicted, strict=True) if p]
        basis += (
            f" Hollow: tp = {', '.join(unmeasured)} predicted from other degrees or a roofline, not measured."
        )
    rows = [
        (kind, str(d), seconds(t), f"{s:.0f}")
        for kind, degrees in (("tp", tensor), ("pp", pipeline))
        for d, t, s in zip(degrees.devices, degrees.tpot_s, degrees.tokens_s, strict=True)
    ]
    return Section(
        "decode-parallelism",
        "Decode: tensor against pipeline parallelism",
        "Fig. 5",
        reading,
        basis,
        data,
        (
            Panel("latency", lambda axes: _draw(axes, data, "tpot_s", 1000, "round (ms)"), "Decode latency"),
            Panel(
                "rate", lambda axes: _draw(axes, data, "tokens_s", 1e-3, "1000 tokens/s"), "Decode throughput"
            ),
        ),
        table(("parallelism", "devices", "round", "tokens/s"), rows),
    )


def _draw(axes: Any, data: DecodeParallelism, field: str, factor: float, label: str) -> None:
    styles = ((data.tensor, "best", "-", "tensor (tp)"), (data.pipeline, "high", "--", "pipeline (pp)"))
    for degrees, role, dash, name in styles:
        values = [factor * v for v in getattr(degrees, field)]
        axes.plot(degrees.devices, values, color=colour(role), linestyle=dash, label=name)
        for x, y, predicted in zip(degrees.devices, values, degrees.predicted, strict=True):
            face = "none" if predicted else colour(role)
            axes.plot([x], [y], "o", markeredgecolor=colour(role), markerfacecolor=face, markersize=5.5)
    if field == "tokens_s":
        base = factor * data.tensor.tokens_s[0]
        axes.plot(
            DEVICES,
            [base * d for d in DEVICES],
            color=colour("muted"),
            linestyle=":",
            linewidth=1.2,
            label="linear",
        )
    axes.set(xlabel="devices", ylabel=label, title="latency" if field == "tpot_s" else "throughput")
    axes.set_xticks(DEVICES)
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")
