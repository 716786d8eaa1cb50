"""The first part of the page: the winner, where it lies, who lost and why, and what was assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from distserve_planner.report.systems import Case
from distserve_planner.report.text import plural
from distserve_planner.search.assignment import Placed
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.result import Row
from distserve_planner.slo import seconds

_ROLE_COLOUR = {"prefill": "stage1", "decode": "stage4", "unified": "best"}
_FAMILY_COLOUR = {"high": "high", "low": "low", "prefill_first": "best", "chunked_prefill": "chunked"}
_RESERVED = {
    "prompt": "a request's prompt",
    "expected": "its prompt and the mean answer",
    "max": "its prompt and the longest answer it may have",
}
_ORDERS = {
    "fcfs": "first come, first served",
    "shortest": "shortest first; a second of waiting counts as {:g} tokens less",
    "deadline": "by when the first token is due",
}
_OBJECTIVES = {
    "per-device": "most goodput per device",
    "cluster": "most goodput on the cluster",
    "least-devices": "fewest devices for the rate",
    "slo-scale": "tightest objectives at the rate",
    "throughput": "most throughput, latency aside",
}


def title(case: Case) -> str:
    """Of the page."""
    cluster = case.problem.cluster
    return (
        f"{case.problem.latency.model_name} on {cluster.num_devices} × {cluster.device}, {case.workload}: "
        "placement report"
    )


def overview(case: Case, goodputs: Mapping[Deployment, float]) -> str:
    """HTML; everything that comes from outside is escaped."""
    problem, result = case.problem, case.result
    slo = problem.slo
    objective = _OBJECTIVES[result.objective.kind]
    if result.objective.rate is not None:
        objective += f" ({result.objective.rate:g} requests/s)"
    sub = (
        f"Objectives: TTFT ≤ {seconds(slo.ttft_s)} and TPOT ≤ {seconds(slo.tpot_s)} for "
        f"{100 * slo.attainment:g} % of requests. Looked for: {objective}. All figures are predictions of "
        "the planner's simulator unless they say otherwise."
    )
    return (
        f'<h1>{escape(title(case))}</h1><p class="sub">{escape(sub)}</p>'
        f'<p class="winner-line">{escape(str(result.winner.deployment))}'
        f'<span class="unit"> on {plural(result.winner.deployment.devices, "device")}</span></p>'
        f'<div class="cards">{_cards(case, goodputs)}</div>'
        f"<h3>Where it lies</h3>{_device_map(case)}{_notes(result.notes)}"
        f"<h3>Why the others lost</h3>{_rows(case)}"
        f"<details><summary>What was assumed</summary>{_facts(case)}</details>"
    )


def _cards(case: Case, goodputs: Mapping[Deployment, float]) -> str:
    winner = case.result.winner
    parts = []
    rate = goodputs.get(winner.deployment, 0.0)
    devices = winner.deployment.devices
    if rate:
        parts.append(_card("goodput", f"{rate / devices:.3g}", "requests/s per device"))
    other = _other(case, goodputs)
    if other is not None and rate:
        label, theirs = other
        parts.append(
            _card(f"against {escape(label)}", f"{rate / devices / theirs:.2f}×", "the rate per device")
        )
    look = case.result.diagnosis
    if look is not None:
        seen, slo = look.attainment, case.problem.slo
        share = f"P{100 * slo.attainment:g}"
        interval = f"95 % interval {100 * seen.low:.1f} to {100 * seen.high:.1f} %"
        parts.append(_card("requests within both", f"{100 * seen.both:.1f} %", f"{interval}, at that rate"))
        parts.append(_metered(f"{share} TTFT", seen.ttft_s, slo.ttft_s))
        parts.append(_metered(f"{share} TPOT", seen.tpot_s, slo.tpot_s))
    return "".join(parts)


def _other(case: Case, goodputs: Mapping[Deployment, float]) -> tuple[str, float] | None:
    """The best system of the other kind, colocated or disaggregated, with its goodput per device."""
    colocated = case.result.winner.deployment.unified is not None
    options = [
        (goodputs[s.deployment] / s.deployment.devices, s.label)
        for s in case.systems
        if s.disaggregated == colocated and goodputs.get(s.deployment)
    ]
    if not options:
        return None
    rate, label = max(options)
    return label, rate


def _card(label: str, value: str, unit: str, extra: str = "") -> str:
    return (
        f'<div class="card"><span class="label">{label}</span><b>{value}</b>'
        f'<span class="unit">{unit}</span>{extra}</div>'
    )


def _metered(label: str, value: float, limit: float) -> str:
    share = min(1.0, value / limit)
    over = " over" if value > limit else ""
    meter = f'<div class="meter{over}"><i style="width:{100 * share:.0f}%"></i></div>'
    return _card(label, escape(seconds(value)), f"of {escape(seconds(limit))}", meter)


def _device_map(case: Case) -> str:
    held: dict[tuple[int, int], tuple[Placed, int]] = {}
    for placed in case.result.placed:
        for stage, (at, devices) in enumerate(placed.stages):
            for device in devices:
                held[at, device] = (placed, stage)
    rows = []
    for index, node in enumerate(case.problem.cluster.nodes):
        used = [held.get((index, device)) for device in range(node.devices)]
        if not any(used):
            continue
        cells = "".join(_device(*cell) if cell else '<div class="device idle">free</div>' for cell in used)
        rows.append(f'<div class="node"><span>{escape(node.name)}</span>{cells}</div>')
    unused = len(case.problem.cluster.nodes) - len(rows)
    rest = f'<p class="basis">{unused} further nodes stay free.</p>' if unused else ""
    repeat = ""
    if case.result.objective.kind == "per-device":
        repeat = '<p class="basis">One unit; repeat it to use more devices.</p>'
    return f'<div class="map">{"".join(rows)}</div>{rest}{repeat}'


def _device(placed: Placed, stage: int) -> str:
    what = f"tp {placed.shape.tp}" + (f", stage {stage}" if placed.shape.pp > 1 else "")
    return (
        f'<div class="device" style="background:var(--{_ROLE_COLOUR[placed.role]})">'
        f"{placed.role} {placed.index}<small>{what}</small></div>"
    )


def _notes(notes: Sequence[str]) -> str:
    return "".join(f'<p class="basis">Note: {escape(note)}.</p>' for note in notes)


def _rows(case: Case) -> str:
    body = "".join(_row(row, row.deployment == case.result.winner.deployment) for row in case.rows)
    left = case.result.shapes.without_memory
    memory = ""
    if left:
        shapes = "; ".join(f"tp {shape.tp}, pp {shape.pp}: {why}" for shape, why in left)
        memory = f'<p class="basis">Shapes without room for KV: {escape(shapes)}.</p>'
    head = "<th>placement</th><th>devices</th><th>result</th><th>attainment</th><th>reason</th>"
    table = f'<table class="candidates"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>{memory}'


def _row(row: Row, winner: bool) -> str:
    swatch = f'<span class="swatch" style="background:var(--{_FAMILY_COLOUR[row.deployment.family]})"></span>'
    seen = None
    if row.entry is not None:
        seen = row.entry.at or row.entry.above or row.entry.lone
    share = "" if seen is None else f"{100 * seen.both:.1f} %"
    if row.entry is not None and row.entry.at is None and seen is not None:
        share += f" at {row.entry.floor / row.deployment.devices:.3g}" if row.entry.floor else " alone"
    mark = ' class="winner"' if winner else ""
    figure = row.figure if row.score > 0 else "loses"
    return (
        f"<tr{mark}><td>{swatch}{escape(str(row.deployment))}</td>"
        f'<td class="devices">{row.deployment.devices}</td>'
        f'<td>{escape(figure)}</td><td>{share}</td><td class="why">{escape(row.reason)}</td></tr>'
    )


def _facts(case: Case) -> str:
    problem, rules = case.problem, case.problem.assumptions
    cluster, precision = problem.cluster, problem.precision
    baseline = problem.unified_latency
    facts = (
        ("model", f"{problem.latency.model_name}, {problem.latency.dtype}"),
        ("times of the engine", problem.latency.source or problem.latency.device),
        ("of the colocated engine", "the same" if baseline is None else baseline.source or baseline.device),
        (
            "cluster",
            f"{cluster.num_nodes} nodes, {cluster.num_devices} devices of "
            f"{cluster.device_memory_bytes / (1 << 30):.0f} GiB; "
            f"{cluster.intra.bandwidth_bytes_s / 1e9:.3g} GB/s per device within a node, "
            f"{cluster.inter.bandwidth_bytes_s / 1e9:.3g} GB/s between nodes",
        ),
        ("pipeline hops", "cost the links' time" if rules.hop == "network" else "free"),
        ("KV transfer", "costs the links' time" if rules.transfer == "network" else "free"),
        ("memory assured at decode", _RESERVED[rules.reserve]),
        ("tensor-parallel degrees", rules.tp.replace("_", " ")),
        ("largest decode batch", str(rules.max_batch_size)),
        ("order of waiting prompts", _ORDERS[rules.order].format(rules.ageing_tokens_per_s)),
        (
            "prompts above a batch",
            f"computed in pieces of {rules.prefill_chunk_tokens} tokens, and overtaken between them"
            if rules.prefill_chunk_tokens
            else "computed whole, alone",
        ),
        (
            "simulated requests",
            f"{precision.min_requests} to {precision.max_requests} per rate, up to "
            f"{problem.long_precision.max_requests} for leaders; rates in steps of {100 * precision.step:g} "
            f"%, seed {precision.seed}",
        ),
    )  # fmt: skip
    return (
        "<dl class='facts'>"
        + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts)
        + "</dl>"
    )
