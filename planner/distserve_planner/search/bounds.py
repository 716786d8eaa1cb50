"""Optimistic bounds on rates in closed form: where bisection starts, and what cannot win."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from distserve_planner.search.problem import Problem
from distserve_planner.simulator.spec import InstanceSpec, Route, SystemSpec

# A tenth of the requests may miss TPOT, so the mean round may be longer than the objective.
TPOT_SLACK = 1.25
# Dispatch by load sends less over a link on which requests wait than equal shares for all would.
TRANSFER_SLACK = 1.25


def prefill_ceiling(problem: Problem, spec: InstanceSpec) -> float:
    """Requests per second when every batch is full: no queueing, no bubbles."""
    requests = problem.requests
    prompts = max(1.0, spec.limits.max_batch_tokens / requests.mean_input)
    stage = spec.latency.prefill_stage_s(
        prompts * requests.mean_input, prompts * requests.mean_square, prompts
    )
    # the batch may also be one long prompt; twice the mean is generous to short ones
    return 1.2 * prompts / stage


def decode_ceiling(problem: Problem, spec: InstanceSpec) -> float:
    """Requests per second at the largest batch that memory and TPOT allow, all of mean length."""
    requests = problem.requests
    steps = requests.mean_output - 1
    if steps <= 0:
        return inf
    context = requests.mean_input + requests.mean_output / 2
    most = int(min(spec.limits.max_batch_size, max(1.0, spec.kv_tokens / context)))
    rounds = spec.rounds
    rounds.grow(most)

    def round_s(batch: int) -> float:
        return rounds.fixed[batch] + rounds.slope[batch] * batch * context

    allowed = TPOT_SLACK * problem.slo.tpot_s
    fitting = [batch for batch in range(1, most + 1) if round_s(batch) <= allowed] or [1]
    return max(batch / round_s(batch) for batch in fitting) / steps * 1.1


def system_ceiling(problem: Problem, system: SystemSpec) -> float:
    """Of a whole deployment; of a unified instance the time of both phases adds up."""
    total = 0.0
    for spec in system.unified:
        prefill, decode = prefill_ceiling(problem, spec), decode_ceiling(problem, spec)
        total += min(prefill, decode)
    if system.unified:
        return total
    prefill = sum(prefill_ceiling(problem, spec) for spec in system.prefill) or inf
    prefill = min(prefill, transfer_ceiling(problem, system.routes))
    return min(prefill, sum(decode_ceiling(problem, spec) for spec in system.decode) or inf)


def transfer_ceiling(problem: Problem, routes: Mapping[tuple[int, int], Route]) -> float:
    """Requests per second at which the busiest port is busy all the time, all pairs sending alike.

    The KV of a request of OPT-66B is seconds of a 25 Gbps card: without this, the rates of phases alone
    promise three times what instances on different nodes can do.
    """
    senders = {source for source, _ in routes}
    load_s: dict[int, float] = {}
    for (source, _), route in routes.items():
        share = 1 / (len(senders) * sum(other == source for other, _ in routes))
        took = route.latency_s + route.s_per_token * problem.requests.mean_input
        for port in route.ports:
            load_s[port] = load_s.get(port, 0.0) + share * took
    busiest = max(load_s.values(), default=0.0)
    return TRANSFER_SLACK / busiest if busiest else inf
