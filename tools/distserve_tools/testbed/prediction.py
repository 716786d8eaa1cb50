"""What the planner's simulator says of the same requests: the same schedulers, the fitted step times, and the
terms that a server adds to them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from distserve.core.config import Policy
from distserve.core.scheduler import Limits
from distserve_planner.profile_file import Profile
from distserve_planner.simulator.spec import InstanceSpec, Route, SystemSpec
from distserve_planner.simulator.system import Simulation
from distserve_planner.slo import Slo
from distserve_planner.workload import Trace
from distserve_tools.load.record import Record
from distserve_tools.testbed.pace import UNDISTURBED, Contention, Pace, at_pace
from distserve_tools.testbed.systems import CHUNKED, DISAGGREGATED, EngineLimits

LONE_GAP_S = 1e4
CONTENTION_ROUNDS = 4


@dataclass(frozen=True)
class ServerTerms:
    """What the serving path adds. The defaults: engines alone, as profiled.

    `first_token_s`: to every TTFT: orchestrator, messages, Triton.
    `idle_cores` and `per_token_s`: the processor time that Triton, stubs, orchestrator and generator take, in
    cores, is `idle_cores` + `per_token_s` times tokens/s; it runs on the engines' cores.
    """

    first_token_s: float = 0.0
    idle_cores: float = 0.0
    per_token_s: float = 0.0
    contention: Contention = UNDISTURBED

    def beside_cores(self, tokens_per_s: float) -> float:
        return self.idle_cores + self.per_token_s * tokens_per_s


@dataclass(frozen=True)
class Predicted:
    """Per request, in order of arrival; seconds."""

    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]

    def met(self, slo: Slo) -> NDArray[np.bool_]:
        return (self.ttft_s <= slo.ttft_s) & (self.tpot_s <= slo.tpot_s)


@dataclass(frozen=True)
class Predictor:
    """One of `SYSTEMS` as `placement_text` describes it. `blocks`: of KV in each instance."""

    system: str
    profile: Profile
    limits: EngineLimits
    blocks: int

    def predict(self, trace: Trace, terms: ServerTerms | None = None, others_cores: float = 0.0) -> Predicted:
        """Every request of the trace, from the first on: the run it is compared with started empty, too.

        others_cores: what processes that have nothing to do with it took during the run; it takes from the
        engines as the work beside them does. How much of that there is depends on the tokens/s, and
        `terms.contention` on how busy the engines are: both come from the simulation itself, so it is
        repeated with what the last one gave.
        """
        terms = terms or ServerTerms()
        idle = terms.contention.pace(0.0, 0.0)
        paces = idle, idle
        still = terms.beside_cores(1.0) + others_cores == 0 and terms.contention == UNDISTURBED
        for _ in range(1 if still else CONTENTION_ROUNDS):
            run = self._run(trace, paces)
            span = run.clock.now - float(trace.arrival_s[0])
            taken = terms.beside_cores(float(trace.output_tokens.sum()) / span) + others_cores
            busy = [min(1.0, e.busy_s / span) for e in (*run.prefill, *run.decode, *run.unified)]
            paces = terms.contention.pace(busy[1], taken), terms.contention.pace(busy[0], taken)
        return _predicted(run, terms.first_token_s)

    def predict_at(self, trace: Trace, paces: tuple[Pace, Pace], first_token_s: float) -> Predicted:
        """The same with the paces that the two engines (prefill first) were seen to have."""
        return _predicted(self._run(trace, paces), first_token_s)

    def _run(self, trace: Trace, paces: tuple[Pace, Pace]) -> Simulation:
        run = Simulation(self._spec(paces), *_columns(trace))
        run.run()
        return run

    def _spec(self, paces: tuple[Pace, Pace]) -> SystemSpec:
        scheduler = Limits(
            max_batch_size=self.limits.max_batch_size,
            max_batch_tokens=self.limits.max_batch_tokens,
            chunk_tokens=self.limits.chunk_tokens,
        )
        first, second = (
            InstanceSpec(
                at_pace(self.profile, pace).latency_model().instance(1),
                self.blocks,
                scheduler,
                self.limits.block_size,
            )
            for pace in paces
        )
        if self.system != DISAGGREGATED:
            policy: Policy = "chunked_prefill" if self.system == CHUNKED else "prefill_first"
            return SystemSpec(unified=(first, second), policy=policy)
        routes = {}
        profile = self.profile
        if profile.transfer is not None:
            per_token = profile.model.kv_bytes_per_token(profile.dtype) / profile.transfer.bandwidth_bytes_s
            routes[0, 0] = Route((0, 1), profile.transfer.latency_s, per_token)
        return SystemSpec((first,), (second,), routes=routes)


def fit_terms(
    predictor: Predictor,
    lone: Trace,
    records: Sequence[Record],
    lone_pace: Pace,
    beside: Sequence[tuple[float, float]],
    contention: Contention,
) -> ServerTerms:
    """From lone requests: how much later their first token comes than in a simulation at the engines' pace.

    beside: (tokens/s, cores taken beside the engines) of runs: a line is laid through them.
    A median over the requests; never negative.
    """
    apart = replace(lone, arrival_s=np.arange(len(lone)) * LONE_GAP_S)
    expected = predictor.predict_at(apart, (lone_pace, lone_pace), 0.0)
    first = statistics.median(r.ttft_s for r in records if r.ok) - float(np.median(expected.ttft_s))
    features = np.array([[1.0, tokens] for tokens, _ in beside])
    idle_cores, per_token_s = nnls(features, np.array([cores for _, cores in beside]))[0]
    return ServerTerms(max(0.0, first), float(idle_cores), float(per_token_s), contention)


def capacity_rps(predictor: Predictor, trace: Trace, slo: Slo, target: float) -> float:
    """The rate at which predicted attainment falls below `target`, within 3 %; 0 if none reaches it."""

    def attained(rate: float) -> float:
        return float(predictor.predict(trace.at_rate(rate)).met(slo).mean())

    low, high = 0.01, 0.02
    if attained(low) < target:
        return 0.0
    while attained(high) >= target and high < 1e4:
        low, high = high, 2 * high
    while high / low > 1.03:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if attained(middle) >= target else (low, middle)
    return low


def _predicted(run: Simulation, first_token_s: float) -> Predicted:
    outcome = run.outcome()
    return Predicted(outcome.ttft_s + first_token_s, outcome.tpot_s)


def _columns(trace: Trace) -> tuple[list[float], list[int], list[int]]:
    return trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist()
