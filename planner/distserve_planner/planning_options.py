"""Options that `search`, `simulate` and `generate` share, on top of those of a case."""

from __future__ import annotations

import argparse
from dataclasses import replace

from distserve.core.parsing import ConfigError, nearest
from distserve_planner.memory import MemoryRule
from distserve_planner.report.arguments import add_case_arguments, parse_shape, problem_of
from distserve_planner.report.effort import Effort
from distserve_planner.search.problem import FAMILIES, Family, Problem


def add_planning_arguments(parser: argparse.ArgumentParser) -> None:
    """Case, assumptions, and how long to simulate."""
    add_case_arguments(parser)
    more = parser.add_argument_group("further assumptions")
    more.add_argument("--max-batch-size", type=int, metavar="N", help="requests decoding at once (512)")
    more.add_argument("--batch-tokens", type=int, metavar="N", help="Lm (default: from the latency model)")
    more.add_argument(
        "--chunk-tokens", metavar="N,N", help="budgets to try for chunked prefill (256,512,1024)"
    )
    more.add_argument(
        "--max-tokens", type=int, metavar="N", help="what clients allow (default: what comes out)"
    )
    more.add_argument(
        "--memory-rule",
        choices=("engine", "simdistserve"),
        default="engine",
        help="KV memory: as the engine reserves it, or the authors' 0.95 - 0.01 of a device",
    )
    effort = parser.add_argument_group("effort")
    effort.add_argument("--quick", action="store_true", help="fewer requests; figures within some %%")
    effort.add_argument("--jobs", type=int, metavar="N", help="processes (default: all cores)")


def planning_problem(args: argparse.Namespace) -> tuple[Problem, str]:
    """The problem and the workload's name. Raises `ConfigError` naming option, value and fix."""
    if args.jobs is not None and args.jobs < 1:
        raise ConfigError(f"--jobs={args.jobs}: must be at least 1")
    problem, workload = problem_of(args, Effort.quick() if args.quick else Effort.full())
    rules = problem.assumptions
    for name in ("max_batch_size", "batch_tokens", "max_tokens"):
        value = getattr(args, name)
        if value is not None:
            if value < 1:
                raise ConfigError(f"--{name.replace('_', '-')}={value}: must be at least 1")
            rules = replace(rules, **{name: value})
    if args.chunk_tokens is not None:
        rules = replace(rules, chunk_tokens=_numbers(args.chunk_tokens, "--chunk-tokens"))
    problem = replace(problem, assumptions=rules, requests=problem.requests.allowing(rules.max_tokens))
    if args.memory_rule == "simdistserve":
        problem = replace(problem, memory=MemoryRule.simdistserve())
    if args.vllm_shape is not None:
        problem = replace(problem, unified_shape=parse_shape(args.vllm_shape, "--vllm-shape"))
    return problem, workload


def families_of(text: str | None) -> tuple[Family, ...]:
    """`high,low` and so on; default: all. Raises `ConfigError` with the nearest known name."""
    if text is None:
        return FAMILIES
    known = {str(family): family for family in FAMILIES}
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--families={text}: {name!r} is not a family of placements{nearest(name, known)}"
            )
    return tuple(known[name] for name in dict.fromkeys(names))


def _numbers(text: str, option: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"{option}={text}: expected whole numbers above 0, for example 256,512")
    return tuple(int(part) for part in parts)
