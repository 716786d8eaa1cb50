"""Options that `search`, `simulate` and `generate` share, on top of those of a case."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from distserve.core.parsing import ConfigError, nearest
from distserve_planner.memory import MemoryRule
from distserve_planner.report.arguments import add_case_arguments, parse_shape, problem_of
from distserve_planner.report.effort import Effort
from distserve_planner.search.problem import FAMILIES, Family, Problem


def add_planning_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Case, assumptions, and how long to simulate. required: of the options without a default."""
    add_case_arguments(parser, required)
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
        "--order",
        choices=("fcfs", "shortest", "deadline"),
        help="of waiting prompts (fcfs); deadline is fcfs while all requests have the same objectives",
    )
    more.add_argument(
        "--ageing",
        type=float,
        metavar="N",
        help="--order shortest: tokens that a second of waiting counts (1000)",
    )
    more.add_argument(
        "--prefill-chunk-tokens",
        type=int,
        metavar="N",
        help="prefill instances compute prompts above Lm in pieces of N tokens (default: whole)",
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
    for name in ("model", "workload", "ttft", "tpot"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name}: is needed")
    if args.jobs is not None and args.jobs < 1:
        raise ConfigError(f"--jobs={args.jobs}: must be at least 1")
    problem, workload = problem_of(args, Effort.quick() if args.quick else Effort.full())
    rules = problem.assumptions
    for name in ("max_batch_size", "batch_tokens", "max_tokens", "prefill_chunk_tokens"):
        value = getattr(args, name)
        if value is not None:
            if value < 1:
                raise ConfigError(f"--{name.replace('_', '-')}={value}: must be at least 1")
            rules = replace(rules, **{name: value})
    if args.order is not None:
        rules = replace(rules, order=args.order)
    if args.ageing is not None:
        if args.order != "shortest":
            raise ConfigError(f"--ageing={args.ageing:g}: belongs to --order shortest")
        if not args.ageing > 0:
            raise ConfigError(f"--ageing={args.ageing:g}: must be above 0 tokens per second")
        rules = replace(rules, ageing_tokens_per_s=args.ageing)
    if args.chunk_tokens is not None:
        rules = replace(rules, chunk_tokens=_numbers(args.chunk_tokens, "--chunk-tokens"))
    problem = replace(problem, assumptions=rules, requests=problem.requests.allowing(rules.max_tokens))
    if args.memory_rule == "simdistserve":
        problem = replace(problem, memory=MemoryRule.simdistserve())
    if args.vllm_shape is not None:
        problem = replace(problem, unified_shape=parse_shape(args.vllm_shape, "--vllm-shape"))
    return problem, workload


def planning_values(args: argparse.Namespace) -> dict[str, Any]:
    """Options of the case that are not at their default, by name, as JSON values."""
    given = {name: getattr(args, name) for name in _defaults() if name != "jobs"}
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in given.items()
        if value != _defaults()[name]
    }


def with_planning_values(args: argparse.Namespace, values: object, where: str) -> argparse.Namespace:
    """`args` with the options that `planning_values` gave. Raises `ConfigError` if one is given here, too."""
    own = planning_values(args)
    if own:
        name = next(iter(own))
        raise ConfigError(f"--{name.replace('_', '-')}={own[name]}: {where} has the case; leave it out")
    known = _defaults()
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: options: expected a mapping, found {values!r}")
    for name in values:
        if name not in known:
            raise ConfigError(f"{where}: options: unknown key '{name}'{nearest(str(name), known)}")
    merged = {**vars(args), **values}
    if merged["cluster"] is not None:
        merged["cluster"] = Path(merged["cluster"])
    return argparse.Namespace(**merged)


def _defaults() -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_planning_arguments(parser, required=False)
    return vars(parser.parse_args([]))


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
