"""Table 3: does our search choose the paper's parallelism, and if not, why not?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from distserve_planner.bench.paper import PaperCase, case_problem
from distserve_planner.goodput import Goodput
from distserve_planner.search.evaluate import evaluate
from distserve_planner.search.problem import Assumptions, Problem
from distserve_planner.search.ranking import Ranked
from distserve_planner.search.reasons import missed
from distserve_planner.search.result import Objective, SearchResult
from distserve_planner.search.search import Progress, search
from distserve_planner.search.tasks import DeploymentTask

# one switch at a time; the default is what the engine does
SWITCHES: Mapping[str, Assumptions] = {
    "free hops": Assumptions(hop="free"),
    "reserve expected output": Assumptions(reserve="expected"),
    "reserve maximum": Assumptions(reserve="max", max_tokens=1024),
    "tp powers of two": Assumptions(tp="powers_of_two"),
}
OUTPUT_SCALES = {"answers half as long": 0.5, "answers twice as long": 2.0}


@dataclass(frozen=True)
class Table3Row:
    """Our winner and the paper's placement with their requests/s per device; `why` if they differ."""

    case: PaperCase
    assumption: str
    ours: Ranked
    ours_rate: float
    paper_rate: float
    why: str
    seconds: float

    @property
    def same(self) -> bool:
        a, b = self.ours.deployment, self.case.unit
        return (a.prefill, a.decode) == (b.prefill, b.decode)


def table3_row(
    case: PaperCase, assumption: str, problem: Problem, jobs: int, progress: Progress | None = None
) -> Table3Row:
    """Searches low affinity for the most requests/s per device, then evaluates the paper's choice."""
    result = search(problem, Objective("per-device"), jobs, progress)
    entry = result.winner.entry
    assert entry is not None
    paper = _paper_goodput(problem, case)
    devices = case.unit.devices
    ours = entry.rate / entry.deployment.devices
    theirs = paper.rate / devices
    why = "" if paper.above is None else f"above that {missed(paper.above, problem.slo)}"
    if paper.rate == 0 and paper.lone is not None:
        why = f"even for a lone request {missed(paper.lone, problem.slo)}"
    return Table3Row(case, assumption, entry, ours, theirs, why, result.statistics.seconds)


def _paper_goodput(problem: Problem, case: PaperCase) -> Goodput:
    found = evaluate(problem, DeploymentTask(case.unit, long=True))
    assert isinstance(found, Goodput)
    return found


def table3(
    cases: tuple[PaperCase, ...],
    jobs: int,
    *,
    quick: bool = False,
    switches: bool = False,
    done: Callable[[Table3Row], None] | None = None,
    progress: Progress | None = None,
) -> list[Table3Row]:
    """All rows under the default assumptions; with `switches` also under each other one."""
    rows = []
    for case in cases:
        problems: dict[str, Problem] = {"default": case_problem(case, quick=quick)}
        if switches:
            for name, rules in SWITCHES.items():
                problems[name] = case_problem(case, assumptions=rules, quick=quick)
            for name, scale in OUTPUT_SCALES.items():
                problems[name] = case_problem(case, quick=quick, output_scale=scale)
        for name, problem in problems.items():
            tell = named(progress, f"{case.name}, {name}")
            rows.append(table3_row(case, name, problem, jobs, tell))
            if done is not None:
                done(rows[-1])
    return rows


def named(progress: Progress | None, what: str) -> Progress | None:
    """The same, each stage with what is being searched."""
    if progress is None:
        return None
    return lambda stage, done, total: progress(f"{what}: {stage}", done, total)


def best_of(result: SearchResult) -> float:
    """Requests/s per device of a winner."""
    entry = result.winner.entry
    assert entry is not None
    return entry.rate / entry.deployment.devices
