"""Speed: the authors' exhaustive search of OPT-13B on 1 x 4, with our simulator and under their rules."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, replace

from distserve_planner.bench.paper import CASES, case_problem
from distserve_planner.search.assignment import assign
from distserve_planner.search.deployment import Deployment, Group
from distserve_planner.search.evaluate import evaluate
from distserve_planner.search.problem import Problem
from distserve_planner.search.result import Objective
from distserve_planner.search.rules import RulesSettings, configurations
from distserve_planner.search.search import search
from distserve_planner.search.system_spec import system_spec
from distserve_planner.search.tasks import RulesTask
from distserve_planner.slo import Slo, attainment

THEIR_CPU_S = 36.0  # simdistserve for the same search (2 cores of a server, 2025); pass your own figure
SETTINGS = RulesSettings()  # 300 requests, rates up to 5 per device, 5 halvings


@dataclass(frozen=True)
class Timing:
    """CPU-seconds of a search, and what it found."""

    name: str
    cpu_s: float
    detail: str


def authors_problem() -> Problem:
    """OPT-13B on one node of four, objectives of the authors' README."""
    problem = case_problem(CASES[0], nodes=1)
    cluster = replace(problem.cluster, nodes=(replace(problem.cluster.nodes[0], devices=4),))
    return replace(problem, cluster=cluster, slo=Slo(0.2, 0.1, separate=True))


def exhaustive_engine(problem: Problem) -> Timing:
    """All placements, bisection steps and requests as theirs, simulated by the engine's schedulers."""
    began = time.process_time()
    best = (0.0, "")
    simulated = 0
    for prefill, decode in configurations(problem, SETTINGS):
        assert decode is not None
        deployment = Deployment("high", Group(prefill), Group(decode))
        placed = assign(deployment, problem.cluster)
        assert placed is not None
        system = system_spec(problem, deployment, placed)
        low, high = 0.0, SETTINGS.max_rate
        while high - low > SETTINGS.stop:
            rate = (low + high) / 2
            run = problem.requests.simulation(system, rate * deployment.devices, SETTINGS.requests)
            run.run()
            simulated += SETTINGS.requests
            seen = attainment(run.outcome(), problem.slo)
            if seen.ttft_s < problem.slo.ttft_s and seen.tpot_s < problem.slo.tpot_s:
                low = rate
                best = max(best, (rate, str(deployment)))
            else:
                high = rate
    spent = time.process_time() - began
    return Timing(
        "exhaustive, engine's schedulers",
        spent,
        f"{1e6 * spent / simulated:.0f} us a request; best {best[1]} {best[0]:.3g}",
    )


def exhaustive_rules(problem: Problem) -> Timing:
    """The same under the authors' rules."""
    began = time.process_time()
    best = (0.0, "")
    configs = configurations(problem, SETTINGS)
    for prefill, decode in configs:
        task = RulesTask(prefill, decode, SETTINGS.requests, SETTINGS.max_rate, SETTINGS.stop)
        rate = evaluate(problem, task)
        assert isinstance(rate, float)
        best = max(best, (rate, f"{prefill} | {decode}"))
    spent = time.process_time() - began
    steps = 5 * len(configs) * SETTINGS.requests
    return Timing(
        "exhaustive, authors' rules",
        spent,
        f"{1e6 * spent / steps:.0f} us a request; best {best[1]} {best[0]:.3g}",
    )


def bounded_engine(problem: Problem) -> Timing:
    """The same placements as `planner search` goes through them: bounds, and as many requests as it takes."""
    began = time.process_time()
    result = search(replace(problem, slo=replace(problem.slo, separate=False)), Objective("per-device"), 1)
    spent = time.process_time() - began
    s = result.statistics
    return Timing(
        "planner search, both objectives met together",
        spent,
        f"{s.tried} of {s.candidates} simulated, up to {problem.long_precision.max_requests} requests; "
        f"best {result.winner.deployment} {result.winner.score:.3g}",
    )


def large_search(jobs: int) -> tuple[float, float, str]:
    """OPT-175B, low affinity, 4 x 8: wall seconds, CPU-seconds of all processes, and the winner."""
    began = _cpu_s()
    result = search(case_problem(CASES[-1]), Objective("per-device"), jobs)
    s = result.statistics
    text = f"{result.winner.deployment}; {s.tried} of {s.candidates} candidates simulated"
    return s.seconds, _cpu_s() - began, text


def _cpu_s() -> float:
    """CPU-seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)
