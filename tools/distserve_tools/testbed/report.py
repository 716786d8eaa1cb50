"""The tables of a campaign in Markdown. What they mean is for people to say."""

from __future__ import annotations

import numpy as np

from distserve_planner.slo import Slo, seconds
from distserve_tools.load.record import STAGES
from distserve_tools.testbed.campaign import Campaign
from distserve_tools.testbed.comparison import (
    allowed_points,
    goodput_rps,
    latency_error,
    pairs,
    repeat_noise,
    winner,
)
from distserve_tools.testbed.cpu_account import PARTS
from distserve_tools.testbed.pace import Contention, Pace, processor_share
from distserve_tools.testbed.report_table import table
from distserve_tools.testbed.runs import Run

TARGETS = (0.9, 0.99)
DEVICES = 2
SCALES = (2.0, 1.5, 1.25, 1.0, 0.8, 0.6, 0.4)


def report(campaign: Campaign) -> str:
    """All tables of one campaign."""
    title = f"## {campaign.workload.label}, {campaign.model}"
    parts = [
        title,
        _settings(campaign),
        "### Lone requests",
        _lone(campaign),
        "### Attainment by rate, measured and simulated",
        *(_pairs(campaign, label, slo) for label, slo in campaign.slos.items()),
        "### Prediction",
        _prediction(campaign),
        "### Pace of the engines",
        _paces(campaign),
        "### Goodput (requests/s per core)",
        _goodput(campaign),
        f"### SLO scale at {campaign.repeated_rate:g} requests/s",
        _scales(campaign),
        "### Where the time goes",
        _stages(campaign),
        "### Processor time",
        _cpu(campaign),
    ]
    return "\n\n".join(parts) + "\n"


def _settings(campaign: Campaign) -> str:
    limits, profile = campaign.limits, campaign.profile
    transfer = profile.transfer
    lines = [
        f"Lengths: {campaign.workload.name} x {campaign.workload.scale:g}. Engines: {profile.dtype}, "
        f"Lm = {limits.max_batch_tokens} tokens, KV {limits.kv_bytes >> 20} MiB, at most "
        f"{limits.max_batch_size} sequences, chunk {limits.chunk_tokens} tokens (chunked_prefill only; the "
        "best of the simulation).",
        "Objectives: "
        + "; ".join(
            f"{label}: TTFT {seconds(slo.ttft_s)}, TPOT {seconds(slo.tpot_s)}"
            for label, slo in campaign.slos.items()
        )
        + ".",
        "Profile: "
        + ", ".join(f"{r.phase} error P50 {r.p50:.1%}, P95 {r.p95:.1%}" for r in profile.residuals)
        + (f"; KV transfer {transfer.bandwidth_bytes_s / 1e9:.2f} GB/s" if transfer else "")
        + ".",
    ]
    return "\n".join(lines)


def _lone(campaign: Campaign) -> str:
    rows = []
    for name, run in campaign.lone.items():
        good = [r for r in run.records if r.ok]
        terms = campaign.terms.get(name)
        rows.append(
            [
                name,
                seconds(float(np.median([r.ttft_s for r in good]))),
                seconds(float(np.median([r.tpot_s for r in good]))),
                seconds(terms.first_token_s) if terms else "-",
                _phases(terms.contention.alone) if terms else "-",
                _phases(terms.contention) if terms else "-",
                f"{terms.idle_cores:.2f} cores + {seconds(terms.per_token_s)} per token" if terms else "-",
                f"{terms.contention.prefill_loss:.2f}, {terms.contention.decode_loss:.2f}" if terms else "-",
            ]
        )
    head = [
        "system",
        "TTFT",
        "TPOT",
        "fitted: first token",
        "steps by the profile (prefill, decode)",
        "beside a computing core, times that",
        "beside the engines",
        "of that lost to a step (prefill, decode)",
    ]
    return table(head, rows)


def _pairs(campaign: Campaign, label: str, slo: Slo) -> str:
    head = ["rate"]
    columns = []
    for name in campaign.systems:
        points = {p.rate_rps: p for p in pairs(campaign.runs, name, slo)}
        head += [f"{name}: measured"]
        columns.append([_share(points[rate].measured) for rate in campaign.rates])
        if all(p.predicted is not None for p in points.values()):
            head += ["simulated", "at the run's pace"]
            columns.append([_share(points[rate].predicted or 0.0) for rate in campaign.rates])
            columns.append([_share(points[rate].predicted_at_pace or 0.0) for rate in campaign.rates])
    rows = [[f"{rate:g}/s", *(c[i] for c in columns)] for i, rate in enumerate(campaign.rates)]
    return f"**{label}** (TTFT {seconds(slo.ttft_s)}, TPOT {seconds(slo.tpot_s)})\n\n" + table(head, rows)


def _prediction(campaign: Campaign) -> str:
    head = [
        "system",
        *(f"mean absolute error: {label}" for label in campaign.slos),
        "TTFT, median error per request",
        "TPOT, median error per request",
        "TTFT P90",
        "TPOT P90",
        "within the noise",
    ]
    rows = []
    for at_pace in (False, True):
        for name in campaign.systems:
            row = _errors(campaign, name, at_pace)
            if row:
                rows.append([name + (", at the run's pace" if at_pace else ""), *row])
    noise = [
        f"{label}: {value:.1f} pt"
        for label, slo in campaign.slos.items()
        if (value := repeat_noise(campaign.runs, campaign.systems, slo)) is not None
    ]
    repeats = max(
        sum(r.rate_rps == campaign.repeated_rate and r.system == name for r in campaign.runs)
        for name in campaign.systems
    )
    text = (
        f"Noise, the standard deviation of attainment between {repeats} runs of the same requests at "
        f"{campaign.repeated_rate:g}/s: {'; '.join(noise)}. *Within the noise*: at most 2 points off, or "
        "twice the noise, where that is more."
    )
    return table(head, rows) + "\n\n" + text


def _errors(campaign: Campaign, system: str, at_pace: bool) -> list[str]:
    """Empty for a peer."""
    errors = latency_error((r for r in campaign.runs if r.system == system), at_pace)
    if errors is None:
        return []
    means, within, count = [], 0, 0
    for slo in campaign.slos.values():
        points = pairs(campaign.runs, system, slo)
        found = [abs((p.error_at_pace if at_pace else p.error) or 0.0) for p in points]
        means.append(f"{np.mean(found):.1f} pt")
        allowed = allowed_points(campaign.runs, campaign.systems, slo)
        within, count = within + sum(error <= allowed for error in found), count + len(found)
    tails = [f"{errors.ttft_p90:+.0%}", f"{errors.tpot_p90:+.0%}", f"{within} of {count}"]
    return [*means, f"{errors.ttft_p50:.0%}", f"{errors.tpot_p50:.0%}", *tails]


def _paces(campaign: Campaign) -> str:
    """Every run in the order in which it was made: the machine's speed drifts."""
    rows = []
    for run in campaign.runs:
        for name, pace in run.paces.items():
            count = run.engines[name]
            prefill = f"x {pace.prefill:.2f}" if count.steps(prompts=True) else "-"
            decode = f"x {pace.decode:.2f}" if count.steps(prompts=False) else "-"
            share = f"{processor_share(count):.0%}"
            rows.append([f"{run.system} {run.rate_rps:g}/s, {name}", prefill, decode, share])
    head = ["run, instance", "prompts take", "decode steps take", "of the time on its core"]
    return table(head, rows) + "\n\nTimes the profile, in the order of the runs."


def _phases(pace: Pace | Contention) -> str:
    return f"x {pace.prefill:.2f}, x {pace.decode:.2f}"


def goodputs(campaign: Campaign, slo: Slo, target: float, predicted: bool) -> dict[str, float]:
    """Requests/s per core of each system, measured or predicted; a peer has no prediction."""
    out = {}
    for name in campaign.systems:
        points = pairs(campaign.runs, name, slo)
        if predicted and any(p.predicted is None for p in points):
            continue
        curve = [(p.rate_rps, (p.predicted or 0.0) if predicted else p.measured) for p in points]
        out[name] = goodput_rps(curve, target) / DEVICES
    return out


def _goodput(campaign: Campaign) -> str:
    names = campaign.systems
    rows = []
    for label, slo in campaign.slos.items():
        for target in TARGETS:
            measured = goodputs(campaign, slo, target, predicted=False)
            simulated = goodputs(campaign, slo, target, predicted=True)
            cells = [
                f"{measured[name]:.2f}" + (f" ({simulated[name]:.2f})" if name in simulated else "")
                for name in names
            ]
            ours = {name: measured[name] for name in simulated}
            rows.append([label, f"{target:.0%}", *cells, winner(ours), winner(simulated)])
    head = ["objective", "attained", *(f"{name} (simulated)" for name in names), "best", "best simulated"]
    note = "Between measured rates by straight lines; 0: missed at the lowest rate already."
    return table(head, rows) + "\n\n" + note


def _scales(campaign: Campaign) -> str:
    rows = []
    for name in campaign.systems:
        runs = [r for r in campaign.runs if r.system == name and r.rate_rps == campaign.repeated_rate]
        shares = [np.mean([run.attainment(campaign.main.scaled(scale)) for run in runs]) for scale in SCALES]
        rows.append([name, *(_share(float(s)) for s in shares)])
    return table(["system", *(f"x{scale:g}" for scale in SCALES)], rows)


def _stages(campaign: Campaign) -> str:
    rows = []
    for name in campaign.systems:
        for rate in campaign.rates:
            runs = [r for r in campaign.runs if r.system == name and r.rate_rps == rate]
            means = {s: float(np.mean([run.stage_means()[s] for run in runs])) for s in STAGES}
            total = sum(means.values())
            if total:
                cells = [seconds(means[s]) for s in STAGES]
                moved = [_moving(run) for run in runs]
                parts = [float(np.mean(part)) / total for part in zip(*moved, strict=True)]
                shares = [f"{share:.2%}" for share in (means["transfer"] / total, *parts)]
                rows.append([f"{name} {rate:g}/s", *cells, *shares])
    head = [
        "system",
        *(s.replace("_", " ") for s in STAGES),
        "transfer share",
        "of it waiting for its turn",
        "on the wire",
    ]
    return table(head, rows)


def _moving(run: Run) -> tuple[float, float]:
    """Seconds per request that its KV waits for its turn, and that it moves, as decode engines count them:
    prefill's count the same transfers from the other end.
    """
    pulling = [count.totals for name, count in run.engines.items() if name.startswith("decode")]
    waits, wires = (sum(c[part] for c in pulling) for part in ("transfer_wait_s", "transfer_wire_s"))
    count = max(1, len(run.records))
    return waits / count, wires / count


def _cpu(campaign: Campaign) -> str:
    rows = [_cpu_row(run) for run in campaign.runs if run.repeat == 0]
    idle = f"Beside the engines while nothing is asked: {campaign.background_cores:.2f} cores."
    head = [
        "run",
        *(f"{part} (cores)" for part in PARTS),
        "other processes (cores)",
        "engine loop outside the model",
        "beside engines per token",
        "generator lag P99",
    ]
    return idle + "\n\n" + table(head, rows)


def _cpu_row(run: Run) -> list[str]:
    wall = run.cpu.wall
    per_token = run.cpu.beside_engines / run.tokens if run.tokens else 0.0
    return [
        f"{run.system} {run.rate_rps:g}/s",
        *(f"{run.cpu.parts[part] / wall:.2f}" for part in PARTS),
        f"{run.cpu.others / wall:.2f}",
        " / ".join(f"{count.loop_share:.1%}" for count in run.engines.values()) or "-",
        f"{1e6 * per_token:.0f} us",
        seconds(run.lag_p99_s),
    ]


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"
