"""What the planner's simulator says of the same requests: the same schedulers, the fitted step times, and the
terms that a server adds to them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from distserve.core.config import Policy
from distserve.core.scheduler import Limits
from distserve_planner.instance_latency import Overhead
from distserve_planner.profile_file import Profile
from distserve_planner.simulator.records import Outcome
from distserve_planner.simulator.spec import InstanceSpec, Route, SystemSpec
from distserve_planner.simulator.system import Simulation
from distserve_planner.slo import Slo
from distserve_planner.workload import Trace
from distserve_tools.load.record import Record
from distserve_tools.testbed.systems import CHUNKED, DISAGGREGATED, EngineLimits

LONE_GAP_S = 1e4


@dataclass(frozen=True)
class ServerTerms:
    """What the serving path adds, in seconds. All zero: engines alone.

    `first_token_s`: to every TTFT: orchestrator, messages, Triton. `iteration_s`: to every step of an engine:
    the loop, and what its core does for others. `per_token_s`: processor time beside the engines for one
    token; it runs on the cores that the engines are pinned to.
    """

    first_token_s: float = 0.0
    iteration_s: float = 0.0
    per_token_s: float = 0.0


@dataclass(frozen=True)
class Predicted:
    """Per request, in order of arrival; seconds."""

    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]

    def met(self, slo: Slo) -> NDArray[np.bool_]:
        return (self.ttft_s <= slo.ttft_s) & (self.tpot_s <= slo.tpot_s)


def predict(spec: SystemSpec, trace: Trace, terms: ServerTerms) -> Predicted:
    """Every request of the trace, from the first on: the run that it is compared with started empty, too."""
    outcome = _simulate(spec, trace)
    return Predicted(outcome.ttft_s + terms.first_token_s, outcome.tpot_s)


def system_spec(
    system: str, profile: Profile, limits: EngineLimits, blocks: int, terms: ServerTerms
) -> SystemSpec:
    """The system that `placement_text` describes. `blocks`: of KV in each instance."""
    latency = _with_terms(profile, system, terms).latency_model().instance(1)
    scheduler = Limits(
        max_batch_size=limits.max_batch_size,
        max_batch_tokens=limits.max_batch_tokens,
        chunk_tokens=limits.chunk_tokens,
    )
    instance = InstanceSpec(latency, blocks, scheduler, limits.block_size)
    if system != DISAGGREGATED:
        policy: Policy = "chunked_prefill" if system == CHUNKED else "prefill_first"
        return SystemSpec(unified=(instance, instance), policy=policy)
    routes = {}
    if profile.transfer is not None:
        per_token = profile.model.kv_bytes_per_token(profile.dtype) / profile.transfer.bandwidth_bytes_s
        routes[0, 0] = Route((0, 1), profile.transfer.latency_s, per_token)
    return SystemSpec((instance,), (instance,), routes=routes)


def fit_terms(plain: SystemSpec, lone: Trace, records: Sequence[Record], per_token_s: float) -> ServerTerms:
    """From lone requests: how much longer they take on the server than in the simulation.

    plain: the system without terms. Medians over the requests; never negative.
    """
    apart = replace(lone, arrival_s=np.arange(len(lone)) * LONE_GAP_S)
    expected = predict(plain, apart, ServerTerms())
    good = [r for r in records if r.ok]
    step = statistics.median(r.tpot_s for r in good) - float(np.median(expected.tpot_s))
    first = statistics.median(r.ttft_s for r in good) - float(np.median(expected.ttft_s))
    iteration_s = max(0.0, step - per_token_s)
    return ServerTerms(max(0.0, first - iteration_s), iteration_s, per_token_s)


def capacity_rps(spec: SystemSpec, trace: Trace, slo: Slo, target: float) -> float:
    """The rate at which predicted attainment falls below `target`, within 3 %; 0 if none reaches it."""

    def attained(rate: float) -> float:
        return float(predict(spec, trace.at_rate(rate), ServerTerms()).met(slo).mean())

    low, high = 0.01, 0.02
    if attained(low) < target:
        return 0.0
    while attained(high) >= target and high < 1e4:
        low, high = high, 2 * high
    while high / low > 1.03:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if attained(middle) >= target else (low, middle)
    return low


def _with_terms(profile: Profile, system: str, terms: ServerTerms) -> Profile:
    """The work beside the engines lands on both cores alike. A disaggregated system's decode core gets half
    of what its own tokens cause; of two unified instances each gets half of both, as much as its own."""
    share = 0.5 if system == DISAGGREGATED else 1.0
    extra = share * terms.per_token_s
    degrees = tuple(
        replace(d, decode=tuple(replace(p, per_request_s=p.per_request_s + extra) for p in d.decode))
        for d in profile.degrees
    )
    return replace(profile, degrees=degrees, overhead=Overhead(iteration_s=terms.iteration_s))


def _simulate(spec: SystemSpec, trace: Trace) -> Outcome:
    columns = (trace.arrival_s, trace.input_tokens, trace.output_tokens)
    run = Simulation(spec, *(column.tolist() for column in columns))
    run.run()
    return run.outcome()
