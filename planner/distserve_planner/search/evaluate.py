"""What worker processes do: plain tasks in, plain results out."""

from __future__ import annotations

from math import inf

import numpy as np

from distserve_planner.goodput import Goodput, goodput, probe, warm_up_requests
from distserve_planner.search.assignment import assign
from distserve_planner.search.bounds import decode_ceiling, prefill_ceiling, system_ceiling
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.diagnosis import diagnose
from distserve_planner.search.problem import Problem
from distserve_planner.search.rules import best_rate
from distserve_planner.search.system_spec import system_spec
from distserve_planner.search.tasks import (
    DeploymentTask,
    DiagnosisTask,
    OfflineResult,
    OfflineTask,
    PhaseTask,
    RateTask,
    Result,
    RulesTask,
    ScaleResult,
    ScaleTask,
    Task,
)
from distserve_planner.simulator.spec import SystemSpec
from distserve_planner.simulator.usage import usage
from distserve_planner.slo import attainment, percentile


def evaluate(problem: Problem, task: Task) -> Result:
    """Runs one task. The deployment must fit the cluster."""
    if isinstance(task, PhaseTask):
        return _phase(problem, task)
    if isinstance(task, RulesTask):
        return best_rate(problem, task)
    system = _system(problem, task.deployment)
    if isinstance(task, DeploymentTask):
        precision = problem.long_precision if task.long else problem.precision
        return goodput(
            system,
            problem.requests,
            problem.slo,
            precision,
            devices=task.deployment.devices,
            ceiling=min(task.ceiling, system_ceiling(problem, system)),
            floor=task.floor,
            first_step=task.first_step,
        )
    if isinstance(task, RateTask):
        precision = problem.long_precision if task.long else problem.precision
        return probe(system, problem.requests, task.rate, problem.slo, precision)
    if isinstance(task, ScaleTask):
        return _scale(problem, task, system)
    if isinstance(task, DiagnosisTask):
        precision = problem.long_precision if task.long else problem.precision
        return diagnose(system, problem.requests, task.rate, problem.slo, precision)
    return _offline(problem, task, system)


def _system(problem: Problem, deployment: Deployment) -> SystemSpec:
    placed = assign(deployment, problem.cluster)
    if placed is None:
        raise ValueError(f"{deployment} does not fit the cluster")
    return system_spec(problem, deployment, placed)


def phase_ceiling(problem: Problem, task: PhaseTask) -> float:
    """Optimistic requests/s of one phase."""
    spec = problem.instance(task.shape, cross_hops=task.cross_hops)
    return (prefill_ceiling if task.role == "prefill" else decode_ceiling)(problem, spec)


def _phase(problem: Problem, task: PhaseTask) -> Goodput:
    spec = problem.instance(task.shape, cross_hops=task.cross_hops)
    prefill = task.role == "prefill"
    system = SystemSpec(prefill=(spec,), ordering=spec.ordering) if prefill else SystemSpec(decode=(spec,))
    return goodput(
        system,
        problem.requests,
        problem.slo,
        problem.phase_precision,
        devices=task.shape.ranks,
        ceiling=phase_ceiling(problem, task),
    )


def _scale(problem: Problem, task: ScaleTask, system: SystemSpec) -> ScaleResult:
    precision = problem.long_precision if task.long else problem.precision
    requests, slo = problem.requests, problem.slo
    warm_up = warm_up_requests(requests, task.rate, slo)
    count = min(precision.max_requests, len(requests) - 2 * warm_up)
    run = requests.simulation(system, task.rate, 2 * warm_up + count)
    run.run(warm_up + count)
    outcome = run.outcome(warm_up, warm_up + count)
    scale = percentile(np.maximum(outcome.ttft_s / slo.ttft_s, outcome.tpot_s / slo.tpot_s), slo.attainment)
    at = attainment(outcome, slo.scaled(scale) if 0 < scale < inf else slo)
    return ScaleResult(scale, at)


def _offline(problem: Problem, task: OfflineTask, system: SystemSpec) -> OfflineResult:
    requests = problem.requests
    count = min(task.requests, len(requests))
    run = requests.simulation(system, 1e9, count)  # all within the first microseconds
    run.run()
    outcome = run.outcome()
    ends = np.sort(outcome.finish[~outcome.refused])
    if len(ends) < count / 2:
        return OfflineResult(0.0, 0.0)
    first, last = len(ends) // 10, 9 * len(ends) // 10
    rate = (last - first) / float(ends[last] - ends[first])
    used = usage(run, outcome, requests.inputs[:count])
    return OfflineResult(rate, rate * requests.mean_output, used)
