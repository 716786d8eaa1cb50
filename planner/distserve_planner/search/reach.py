"""Objectives that no load can excuse: what a lone request reaches."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape
from distserve_planner.goodput import lone
from distserve_planner.search.problem import Problem
from distserve_planner.simulator.spec import SystemSpec
from distserve_planner.slo import seconds


def check_reachable(problem: Problem, fitting: Sequence[Shape]) -> None:
    """Raises `ConfigError` if no shape meets an objective even for lone requests, with the best figure."""
    slo, requests = problem.slo, problem.requests
    best_ttft, best_tpot = (inf, fitting[0]), (inf, fitting[0])
    for shape in fitting:
        spec = problem.instance(shape)
        alone = lone(SystemSpec(prefill=(spec,)), requests, slo)
        best_ttft = min(best_ttft, (alone.ttft_s, shape), key=_seconds)
        alone = lone(SystemSpec(decode=(spec,)), requests, slo)
        best_tpot = min(best_tpot, (alone.tpot_s, shape), key=_seconds)
    share = f"P{100 * slo.attainment:g}"
    for name, (value, shape), wanted in (("TTFT", best_ttft, slo.ttft_s), ("TPOT", best_tpot, slo.tpot_s)):
        if value > wanted:
            raise ConfigError(
                f"{name.lower()}_s={wanted}: impossible even for a lone request; the best reachable {share} "
                f"{name} is {seconds(value)}, with tp={shape.tp}, pp={shape.pp}. Allow more"
            )


def _seconds(found: tuple[float, Shape]) -> float:
    return found[0]
