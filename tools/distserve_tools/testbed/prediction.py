"""What the planner's simulator says of the same requests: the same schedulers, the fitted step times, and the
terms that a server adds to them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from distserve.core.config import Policy
from distserve.core.scheduler import Limits
from distserve_planner.coefficients import DecodePiece, HeadCost, PrefillPiece
from distserve_planner.instance_latency import Overhead
from distserve_planner.profile_file import Profile
from distserve_planner.simulator.spec import InstanceSpec, Route, SystemSpec
from distserve_planner.simulator.system import Simulation
from distserve_planner.slo import Slo
from distserve_planner.workload import Trace
from distserve_tools.load.record import Record
from distserve_tools.testbed.company import ALONE, Company
from distserve_tools.testbed.systems import CHUNKED, DISAGGREGATED, EngineLimits

LONE_GAP_S = 1e4
CONTENTION_ROUNDS = 4

Piece = TypeVar("Piece", PrefillPiece, DecodePiece, HeadCost)


@dataclass(frozen=True)
class ServerTerms:
    """What the serving path adds. All zero: engines alone.

    `first_token_s`: to every TTFT: orchestrator, messages, Triton. `iteration_s`: to every step of an engine.
    `idle_cores` and `per_token_s`: the processor time that Triton, stubs, orchestrator and generator take, in
    cores, is `idle_cores` + `per_token_s` times tokens/s; it runs on the engines' cores.
    """

    first_token_s: float = 0.0
    iteration_s: float = 0.0
    idle_cores: float = 0.0
    per_token_s: float = 0.0

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
    company: Company = ALONE

    def predict(self, trace: Trace, terms: ServerTerms | None = None, others_cores: float = 0.0) -> Predicted:
        """Every request of the trace, from the first on: the run it is compared with started empty, too.

        others_cores: what processes that have nothing to do with it took during the run. With the work beside
        the engines it goes to a core whose engine is idle, and takes from both alike while both compute:
        steps get longer by 1 / (1 - cores / 2 * share of the time in which the other engine computes), and by
        `company` for that share. The share and the tokens/s come from the simulation itself, so it is
        repeated with what the last one gave.
        """
        terms = terms or ServerTerms()
        stretch = ALONE, ALONE
        alone = terms.beside_cores(1.0) + others_cores == 0 and self.company == ALONE
        for _ in range(1 if alone else CONTENTION_ROUNDS):
            run = Simulation(self._spec(terms, stretch), *_columns(trace))
            run.run()
            span = run.clock.now - float(trace.arrival_s[0])
            taken = terms.beside_cores(float(trace.output_tokens.sum()) / span) + others_cores
            busy = [engine.busy_s / span for engine in (*run.prefill, *run.decode, *run.unified)]
            stretch = self._stretch(taken, busy[1]), self._stretch(taken, busy[0])
        outcome = run.outcome()
        return Predicted(outcome.ttft_s + terms.first_token_s, outcome.tpot_s)

    def _stretch(self, taken_cores: float, other_busy: float) -> Company:
        """How much longer steps get; at most as if the engine kept a quarter of its core."""
        share = min(1.0, other_busy)
        lost = 1 / max(0.25, 1 - taken_cores / 2 * share)
        return Company(*(lost * (1 + (f - 1) * share) for f in (self.company.prefill, self.company.decode)))

    def _spec(self, terms: ServerTerms, stretch: tuple[Company, Company]) -> SystemSpec:
        scheduler = Limits(
            max_batch_size=self.limits.max_batch_size,
            max_batch_tokens=self.limits.max_batch_tokens,
            chunk_tokens=self.limits.chunk_tokens,
        )
        profile = replace(self.profile, overhead=Overhead(iteration_s=terms.iteration_s))
        first, second = (
            InstanceSpec(
                _stretched(profile, factor).latency_model().instance(1),
                self.blocks,
                scheduler,
                self.limits.block_size,
            )
            for factor in stretch
        )
        if self.system != DISAGGREGATED:
            policy: Policy = "chunked_prefill" if self.system == CHUNKED else "prefill_first"
            return SystemSpec(unified=(first, second), policy=policy)
        routes = {}
        if profile.transfer is not None:
            per_token = profile.model.kv_bytes_per_token(profile.dtype) / profile.transfer.bandwidth_bytes_s
            routes[0, 0] = Route((0, 1), profile.transfer.latency_s, per_token)
        return SystemSpec((first,), (second,), routes=routes)


def fit_terms(
    predictor: Predictor, lone: Trace, records: Sequence[Record], beside: Sequence[tuple[float, float]]
) -> ServerTerms:
    """From lone requests: how much longer they take on the server than in the simulation.

    beside: (tokens/s, cores taken beside the engines) of runs: a line is laid through them.
    Medians over the requests; never negative.
    """
    apart = replace(lone, arrival_s=np.arange(len(lone)) * LONE_GAP_S)
    expected = predictor.predict(apart)
    good = [r for r in records if r.ok]
    step = statistics.median(r.tpot_s for r in good) - float(np.median(expected.tpot_s))
    first = statistics.median(r.ttft_s for r in good) - float(np.median(expected.ttft_s))
    iteration_s = max(0.0, step)
    features = np.array([[1.0, tokens] for tokens, _ in beside])
    idle_cores, per_token_s = nnls(features, np.array([cores for _, cores in beside]))[0]
    return ServerTerms(max(0.0, first - iteration_s), iteration_s, float(idle_cores), float(per_token_s))


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


def _stretched(profile: Profile, factors: Company) -> Profile:
    """All step times longer by `factors`."""
    degrees = tuple(
        replace(
            degree,
            prefill=tuple(_times(piece, factors.prefill) for piece in degree.prefill),
            decode=tuple(_times(piece, factors.decode) for piece in degree.decode),
            head=_times(degree.head, factors.decode),
        )
        for degree in profile.degrees
    )
    return replace(profile, degrees=degrees)


def _times(piece: Piece, factor: float) -> Piece:
    """The fields of a coefficient row that are seconds."""
    scaled = {f.name: factor * getattr(piece, f.name) for f in fields(piece) if f.name.endswith("_s")}
    return replace(piece, **scaled)


def _columns(trace: Trace) -> tuple[list[float], list[int], list[int]]:
    return trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist()
