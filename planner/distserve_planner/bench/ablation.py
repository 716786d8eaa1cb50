"""Fig. 11: vLLM, vLLM++ (its best parallelism), DistServe-Low and DistServe-High, OPT-66B on ShareGPT."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape
from distserve_planner.bench.paper import CASES, NVLINK, PaperCase, case_problem
from distserve_planner.bench.table3 import best_of, named
from distserve_planner.search.problem import Family, Problem
from distserve_planner.search.result import Objective
from distserve_planner.search.search import Progress, search

PAPER_ORDER = "DistServe-High >= DistServe-Low > vLLM++ = vLLM"
VLLM = Shape(4, 1)  # what the paper ran vLLM with for OPT-66B


@dataclass(frozen=True)
class AblationBar:
    """One system with its best placement."""

    system: str
    placement: str
    rate: float  # requests/s per device; 0 if it meets the objectives at no rate, `placement` says why
    ratio: float  # to DistServe-Low


def ablation_cases() -> tuple[PaperCase, ...]:
    """Both sets of objectives: Table 1's and the artifact's."""
    return tuple(case for case in CASES if case.model == "opt-66b" and case.workload == "sharegpt")


def ablation(
    case: PaperCase, jobs: int, quick: bool = False, progress: Progress | None = None
) -> list[AblationBar]:
    """High affinity stands on a cluster whose nodes are joined as fast as devices within one."""
    low = case_problem(case, quick=quick)
    fast = case_problem(case, quick=quick, network=NVLINK)

    def of(problem: Problem, *families: Family) -> Problem:
        return replace(problem, families=families)

    systems = {
        "vLLM": replace(of(low, "prefill_first"), unified_shape=VLLM),
        "vLLM++": of(low, "prefill_first"),
        "chunked prefill": of(low, "chunked_prefill"),
        "DistServe-Low": low,
        "DistServe-High": of(fast, "high"),
        "vLLM++ with our engine's times": replace(of(low, "prefill_first"), unified_latency=None),
    }
    found: dict[str, tuple[str, float]] = {}
    for name, problem in systems.items():
        try:
            result = search(problem, Objective("per-device"), jobs, named(progress, f"{case.name}, {name}"))
            found[name] = (str(result.winner.deployment), best_of(result))
        except ConfigError as error:
            found[name] = (str(error), 0.0)
    base = found["DistServe-Low"][1]
    return [
        AblationBar(name, text, rate, rate / base if base else 0.0) for name, (text, rate) in found.items()
    ]
