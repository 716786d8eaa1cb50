"""One model and one workload: lone requests, repeats, rates, all systems in turn, and the same simulated."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distserve_planner.profile_file import Profile
from distserve_planner.slo import Slo
from distserve_tools.testbed.engine_counters import merged
from distserve_tools.testbed.pace import fit_contention, measured_pace
from distserve_tools.testbed.plan import (
    CHUNKS,
    LONGEST_PROMPT_S,
    OBJECTIVES,
    ScaledWorkload,
    TestbedPlan,
)
from distserve_tools.testbed.prediction import Predictor, ServerTerms, capacity_rps, fit_terms
from distserve_tools.testbed.runs import Run, idle_time, run_once
from distserve_tools.testbed.systems import CHUNKED, SYSTEMS, EngineLimits, Served
from distserve_tools.testbed.traces import lone_requests, requests_at

SIZING_REQUESTS = 400  # simulated, to choose rates and the chunk
# rates, as shares of the highest at which half of the requests meet the objectives in the simulation: engines
# alone, so a server is overrun below it
LOWEST, HIGHEST = 0.15, 1.05
WARM_UP_REQUESTS = 4
IDLE_S = 4.0

Say = Callable[[str], None]


@dataclass
class Campaign:
    """What was measured of one model under one workload."""

    model: str
    workload: ScaledWorkload
    profile: Profile
    limits: EngineLimits
    blocks: Mapping[str, int]  # of KV in each instance, by system; 0 if not known
    lone: Mapping[str, Run]
    slos: Mapping[str, Slo]  # by the objective's label
    terms: Mapping[str, ServerTerms]
    rates: Sequence[float]
    repeated_rate: float
    background_cores: float = 0.0  # beside the engines, while nothing is asked of any system
    runs: list[Run] = field(default_factory=list)

    @property
    def main(self) -> Slo:
        return next(iter(self.slos.values()))

    @property
    def systems(self) -> tuple[str, ...]:
        return tuple(self.lone)


def fitting(profile: Profile, workload: ScaledWorkload, limits: EngineLimits) -> ScaledWorkload:
    """The workload in the largest of its sizes that this core computes fast enough, or the smallest."""
    for size in workload.sizes:
        if simulated_lone(profile, size, limits)[0] <= LONGEST_PROMPT_S:
            break
    return size


def sizing(profile: Profile, workload: ScaledWorkload, limits: EngineLimits) -> tuple[EngineLimits, float]:
    """The chunk that serves the chunked baseline best, and the rate at which the best system is overrun.

    By simulation, so that no system's settings were tried on the requests that it is then measured with.
    """
    trace = requests_at(workload, 1.0, SIZING_REQUESTS, seed=10_000, max_context=profile.model.max_context)
    slo = _expected_slo(profile, workload, limits)
    blocks = blocks_of(profile, limits)

    def capacity(system: str, limits: EngineLimits, target: float) -> float:
        return capacity_rps(Predictor(system, profile, limits, blocks), trace, slo, target)

    tried = {c: capacity(CHUNKED, _with_chunk(limits, c), slo.attainment) for c in CHUNKS}
    chosen = _with_chunk(limits, max(tried, key=lambda c: (tried[c], c)))
    return chosen, max(capacity(system, chosen, 0.5) for system in SYSTEMS)


def blocks_of(profile: Profile, limits: EngineLimits) -> int:
    """KV blocks that fit into an instance's pool."""
    block_bytes = profile.model.kv_bytes_per_token(profile.dtype) * limits.block_size
    return limits.kv_bytes // block_bytes


def _with_chunk(limits: EngineLimits, chunk: int) -> EngineLimits:
    return EngineLimits(
        limits.max_batch_tokens, chunk, limits.kv_bytes, limits.max_batch_size, limits.block_size
    )


def _expected_slo(profile: Profile, workload: ScaledWorkload, limits: EngineLimits) -> Slo:
    """The first objective, from lone requests as simulated."""
    ttft, tpot, _ = simulated_lone(profile, workload, limits)
    return OBJECTIVES[0].slo(ttft, tpot)


def simulated_lone(
    profile: Profile, workload: ScaledWorkload, limits: EngineLimits
) -> tuple[float, float, int]:
    """TTFT, TPOT and tokens of a lone request of the mean lengths."""
    trace = lone_requests(workload, 2, 1e4, profile.model.max_context)
    seen = Predictor(SYSTEMS[0], profile, limits, blocks_of(profile, limits)).predict(trace)
    return float(seen.ttft_s[0]), float(seen.tpot_s[0]), int(trace.output_tokens[0])


def grid(top: float, count: int) -> list[float]:
    """`count` rates, evenly spaced, to two digits after the point."""
    step = (HIGHEST - LOWEST) / max(1, count - 1)
    return [round(top * (LOWEST + step * i), 2) for i in range(count)]


def begin_campaign(
    plan: TestbedPlan,
    model: str,
    workload: ScaledWorkload,
    profile: Profile,
    limits: EngineLimits,
    top_rps: float,
    served: Mapping[str, Served],
    say: Say,
) -> Campaign:
    """Measures lone requests, which the objectives follow from, and what all take while nothing is asked."""
    everybody = list(served.values())
    context, vocab = profile.model.max_context, profile.model.vocab_size
    _warm_up(workload, served, context, vocab)
    lone_trace = lone_requests(workload, plan.lone_requests, _lone_gap(profile, workload, limits), context)
    lone = {}
    for name, system in served.items():
        say(f"{workload.label}: {len(lone_trace)} lone requests, {name}")
        lone[name] = run_once(system, everybody, lone_trace, 0.0, 0, vocab)
    idle = idle_time(everybody, IDLE_S)
    ttft, tpot = _lone_times(lone)
    slos = {objective.label: objective.slo(ttft, tpot) for objective in OBJECTIVES}
    rates = grid(top_rps, plan.rates)
    blocks = {name: system.blocks for name, system in served.items()}
    middle = rates[len(rates) // 2]
    campaign = Campaign(model, workload, profile, limits, blocks, lone, slos, {}, rates, middle)
    campaign.background_cores = idle.beside_engines / idle.wall
    return campaign


def measure(
    plan: TestbedPlan,
    campaign: Campaign,
    served: Mapping[str, Served],
    say: Say,
    keep: Callable[[Campaign], None],
) -> None:
    """Measures all systems in turn at every rate that is missing, then simulates what was sent.

    `keep` is called after each turn, with what there is.
    """
    everybody = list(served.values())
    context, vocab = campaign.profile.model.max_context, campaign.profile.model.vocab_size
    label = campaign.workload.label
    turns = missing_turns(campaign, plan)
    campaign.runs = [run for run in campaign.runs if (run.rate_rps, run.repeat) not in turns]
    for rate, repeat in turns:
        trace = requests_at(campaign.workload, rate, plan.requests(rate), 1, context)
        for name, system in _in_turn(served, repeat):
            run = run_once(system, everybody, trace, rate, repeat, vocab)
            campaign.runs.append(run)
            say(f"{label}: {rate:g}/s {name}: {_line(run, campaign.main)}")
        keep(campaign)
    add_predictions(campaign)


def belongs(campaign: Campaign, plan: TestbedPlan, systems: int) -> bool:
    """Are its runs some of those that the plan asks for, of so many systems?"""
    turns = plan.turns(campaign.rates, campaign.repeated_rate)
    return (
        campaign.model in plan.models
        and any(campaign.workload in workload.sizes for workload in plan.workloads)
        and len(campaign.systems) == systems
        and len(campaign.rates) == plan.rates
        and all(len(run.trace) == plan.lone_requests for run in campaign.lone.values())
        and all((run.rate_rps, run.repeat) in turns for run in campaign.runs)
        and all(len(run.trace) == plan.requests(run.rate_rps) for run in campaign.runs)
    )


def missing_turns(campaign: Campaign, plan: TestbedPlan) -> list[tuple[float, int]]:
    """Those of the plan that not every system has its run of."""
    seen = {(run.rate_rps, run.repeat, run.system) for run in campaign.runs}
    turns = plan.turns(campaign.rates, campaign.repeated_rate)
    return [turn for turn in turns if not all((*turn, system) in seen for system in campaign.systems)]


def with_whole_rates(campaign: Campaign) -> Campaign | None:
    """The campaign without rates that not every system was measured at; None if no rate is left."""
    seen = {(run.rate_rps, run.system) for run in campaign.runs}
    rates = [rate for rate in campaign.rates if all((rate, s) in seen for s in campaign.systems)]
    if len(rates) == len(campaign.rates):
        return campaign
    runs = [run for run in campaign.runs if run.rate_rps in rates]
    return replace(campaign, rates=rates, runs=runs) if rates else None


def add_predictions(campaign: Campaign) -> None:
    """Fits the server's terms to lone requests and the middle rate's repeats, then simulates every run: with
    these terms, and at the pace that its engines had.
    """
    predictors = {
        name: Predictor(name, campaign.profile, campaign.limits, campaign.blocks[name])
        for name in campaign.systems
        if name in SYSTEMS  # a peer's engine is not profiled
    }
    alone = {  # the engine is the same in all systems
        f"{name}/{instance}": count
        for name in predictors
        for instance, count in campaign.lone[name].engines.items()
    }
    campaign.terms = {
        name: fit_terms(
            predictor,
            campaign.lone[name].trace,
            campaign.lone[name].records,
            measured_pace(campaign.profile, merged(campaign.lone[name].engines.values())),
            beside_engines(campaign, name),
            fit_contention(campaign.profile, alone, [run.loaded() for run in repeated(campaign, name)]),
        )
        for name, predictor in predictors.items()
    }
    for run in campaign.runs:
        if run.system in predictors:
            predictor, terms = predictors[run.system], campaign.terms[run.system]
            others = max(0.0, run.cpu.others / run.cpu.wall)
            run.predicted = predictor.predict(run.trace, terms, others)
            run.paces = {name: measured_pace(campaign.profile, c) for name, c in run.engines.items()}
            first, second = run.paces.values()
            run.predicted_at_pace = predictor.predict_at(run.trace, (first, second), terms.first_token_s)


def repeated(campaign: Campaign, system: str) -> list[Run]:
    """The repeats of the middle rate."""
    return [r for r in campaign.runs if r.system == system and r.rate_rps == campaign.repeated_rate]


def beside_engines(campaign: Campaign, system: str) -> list[tuple[float, float]]:
    """(tokens/s, cores beside the engines) of the lone requests and of each repeat of the middle rate."""
    return [
        (run.tokens / run.cpu.wall, run.cpu.beside_engines / run.cpu.wall)
        for run in (campaign.lone[system], *repeated(campaign, system))
    ]


def _lone_gap(profile: Profile, workload: ScaledWorkload, limits: EngineLimits) -> float:
    """Time enough for one request to end before the next."""
    ttft, tpot, tokens = simulated_lone(profile, workload, limits)
    return 1.3 * (ttft + tpot * tokens) + 0.3


def _lone_times(lone: Mapping[str, Run]) -> tuple[float, float]:
    """Median TTFT and TPOT of lone requests, all of our systems together: the same objectives for all."""
    records = [r for name, run in lone.items() if name in SYSTEMS for r in run.records if r.ok]
    return statistics.median(r.ttft_s for r in records), statistics.median(r.tpot_s for r in records)


def _in_turn(served: Mapping[str, Served], turn: int) -> list[tuple[str, Served]]:
    """Every repeat starts with another system."""
    names = list(served)
    shift = turn % len(names)
    return [(name, served[name]) for name in names[shift:] + names[:shift]]


def _warm_up(workload: ScaledWorkload, served: Mapping[str, Served], context: int, vocab: int) -> None:
    """All instances of a system compute something before it is measured: the requests come together."""
    trace = requests_at(workload, 1e3, WARM_UP_REQUESTS, 2, context)
    for system in served.values():
        run_once(system, [], trace, 0.0, 0, vocab)


def _line(run: Run, slo: Slo) -> str:
    failed = [r.error or "no token" for r in run.records if not r.ok]
    text = f"{len(run.records)} requests, attainment {100 * run.attainment(slo):.0f} %"
    text += f", other processes {run.cpu.others / run.cpu.wall:.2f} cores"
    return text + (f", {len(failed)} failed ({failed[0][:150]})" if failed else "")
