"""The whole search: phases, families, ranking, and what to say about it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape
from distserve_planner.goodput import Goodput
from distserve_planner.search.algorithm1 import Candidate, Phases, combinations, replicas
from distserve_planner.search.algorithm2 import bounded_units
from distserve_planner.search.assignment import assign, units_that_fit
from distserve_planner.search.candidates import Shapes, pairs, phase_tasks, shapes, unified_units
from distserve_planner.search.deployment import LABELS
from distserve_planner.search.diagnosis import Diagnosis
from distserve_planner.search.evaluate import phase_ceiling
from distserve_planner.search.least_devices import least_devices, sized_units
from distserve_planner.search.problem import Family, Problem
from distserve_planner.search.ranking import Ranked, rank
from distserve_planner.search.reach import check_reachable
from distserve_planner.search.reasons import missed, offline_limit, reason
from distserve_planner.search.result import Objective, Row, SearchResult, Statistics
from distserve_planner.search.result_file import best_by_family
from distserve_planner.search.tasks import DiagnosisTask, OfflineResult, OfflineTask, ScaleResult, ScaleTask
from distserve_planner.search.unified import bounded_unified
from distserve_planner.search.workers import Workers
from distserve_planner.slo import Slo, seconds

KEEP = 12  # combinations of Algorithm 1 that are tried jointly
RUNNERS_UP = 3  # per family, with reasons
OFFLINE_S = 1e6  # objectives of offline use: none
WIDE_KEEP = 60  # where the phases' own rates say less

Progress = Callable[[str, int, int], None]


def search(
    problem: Problem,
    objective: Objective,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Finds the best placement.

    Raises `ConfigError` if the model fits nowhere, or no placement meets the objectives, with the best figure
    that can be reached.
    """
    began = time.monotonic()
    report = progress or (lambda stage, done, total: None)
    if objective.kind == "throughput":
        problem = replace(problem, slo=Slo(OFFLINE_S, OFFLINE_S, problem.slo.attainment))
    available = shapes(problem)
    if objective.kind not in ("slo-scale", "throughput"):
        check_reachable(problem, available.fitting)
    with Workers(problem, jobs or os.cpu_count() or 1) as workers:
        run = _Search(problem, objective, workers, available, report)
        rows = run.rows()
        best = [row for row in rows if row.score > 0]
        if not best:
            raise ConfigError(run.nothing_found(rows))
        best.sort(key=_best_first)
        rows, diagnosis = run.explain(rows, best[0])
    winner = next(row for row in rows if row.deployment == best[0].deployment)
    placed = assign(winner.deployment, problem.cluster)
    assert placed is not None
    statistics = Statistics(
        len(available.fitting),
        len(run.phases),
        run.candidates,
        run.tried,
        time.monotonic() - began,
        workers.jobs,
    )
    return SearchResult(
        objective,
        winner,
        placed,
        diagnosis,
        tuple(rows),
        best_by_family(tuple(rows)),
        available,
        statistics,
        run.notes(winner),
    )


class _Search:
    def __init__(
        self, problem: Problem, objective: Objective, workers: Workers, available: Shapes, report: Progress
    ) -> None:
        self.problem = problem
        self.objective = objective
        self.workers = workers
        self.report = report
        self.fitting = available.fitting
        self.candidates = self.tried = 0
        self.units = pairs(problem, self.fitting) if "low" in problem.families else []
        self.phases = self._size_phases()

    def _size_phases(self) -> Phases:
        """Rates of phases alone: goodput, or what full batches allow where the objectives are not given."""
        tasks = phase_tasks(self.problem, self.fitting, self.units)
        if self.objective.kind in ("slo-scale", "throughput"):
            return {task: Goodput(phase_ceiling(self.problem, task), None, None) for task in tasks}
        done = 0

        def one(task: object, result: object) -> None:
            nonlocal done
            done += 1
            self.report("phases", done, len(tasks))

        results = self.workers.map(tasks, one)
        return {
            task: result for task, result in zip(tasks, results, strict=True) if isinstance(result, Goodput)
        }

    def rows(self) -> list[Row]:
        rows: list[Row] = []
        for family in self.problem.families:
            candidates = self._candidates(family)
            self.candidates += len(candidates)
            if candidates:
                rows += self._family(family, candidates)
        return rows

    def _candidates(self, family: Family) -> list[Candidate]:
        problem, objective = self.problem, self.objective
        if family == "high":
            if objective.kind == "least-devices":
                assert objective.rate is not None
                return replicas(problem, self.phases, objective.rate, KEEP)
            wide = objective.kind in ("slo-scale", "throughput")
            return combinations(
                problem,
                self.phases,
                per_device=objective.kind == "per-device",
                keep=WIDE_KEEP if wide else KEEP,
                all_shapes=wide,
            )
        if family == "low":
            units = bounded_units(problem, self.units, self.phases)
        else:
            units = unified_bounds(problem, family, self.fitting)
        if objective.kind == "per-device":
            return units
        if objective.kind == "least-devices":
            assert objective.rate is not None
            return sized_units(units, objective.rate)
        filled = []
        for unit in units:
            count = units_that_fit(unit.deployment, problem.cluster)
            if count:
                filled.append(Candidate(unit.deployment.with_units(count), 1.1 * count * unit.predicted))
        return filled

    def _family(self, family: Family, candidates: list[Candidate]) -> list[Row]:
        kind, rate = self.objective.kind, self.objective.rate
        if kind == "slo-scale":
            return self._scales(candidates)
        if kind == "throughput":
            return self._offline(candidates)
        if kind == "least-devices":
            assert rate is not None
            entries = least_devices(self.workers, self.problem, candidates, rate)
            self.tried += len(entries)
        else:
            per_device = kind == "per-device"
            entries = rank(
                self.workers,
                candidates,
                (lambda d: float(d.devices)) if per_device else (lambda d: 1.0),
                lambda done, total: self.report(LABELS[family], done, total),
            )
            self.tried += sum(entry.tried for entry in entries)
        return [self._row(entry) for entry in entries]

    def _row(self, entry: Ranked) -> Row:
        deployment, kind = entry.deployment, self.objective.kind
        devices = deployment.devices
        if kind == "least-devices":
            score = 1 / devices if entry.rate > 0 else 0.0
            figure = f"{devices} devices" if entry.rate > 0 else f"not with {devices} devices"
            return Row(deployment, score, figure, "", entry)
        score = entry.rate / devices if kind == "per-device" else entry.rate
        return Row(deployment, score, f"{entry.rate / devices:.3g} req/s/device", "", entry)

    def _scales(self, candidates: list[Candidate]) -> list[Row]:
        assert self.objective.rate is not None
        rate = self.objective.rate
        results = self.workers.map([ScaleTask(c.deployment, rate) for c in candidates])
        self.tried += len(candidates)
        order = sorted(
            zip(candidates, results, strict=True),
            key=lambda pair: pair[1].scale if isinstance(pair[1], ScaleResult) else inf,
        )[: 2 * RUNNERS_UP]
        finals = self.workers.map([ScaleTask(c.deployment, rate, long=True) for c, _ in order])
        rows = []
        for (candidate, _), final in zip(order, finals, strict=True):
            assert isinstance(final, ScaleResult)
            slo = self.problem.slo.scaled(final.scale) if 0 < final.scale < inf else self.problem.slo
            text = f"scale {final.scale:.3g}: TTFT {seconds(slo.ttft_s)}, TPOT {seconds(slo.tpot_s)}"
            limit = final.at.missed(slo)
            met = f"{100 * final.at.ttft:.0f} % TTFT, {100 * final.at.tpot:.0f} % TPOT met there"
            why = f"limited by {limit} ({met})"
            rows.append(Row(candidate.deployment, 1 / final.scale if final.scale < inf else 0.0, text, why))
        return rows

    def _offline(self, candidates: list[Candidate]) -> list[Row]:
        candidates = sorted(candidates, key=lambda c: -c.predicted)[:WIDE_KEEP]
        results = self.workers.map([OfflineTask(c.deployment) for c in candidates])
        self.tried += len(candidates)
        rows = []
        for candidate, result in zip(candidates, results, strict=True):
            assert isinstance(result, OfflineResult)
            text = f"{result.tokens_s:.4g} tokens/s, {result.requests_s:.3g} req/s"
            why = offline_limit(result.usage) if result.usage is not None else "serves hardly any request"
            rows.append(Row(candidate.deployment, result.tokens_s, text, why))
        return rows

    def explain(self, rows: list[Row], winner: Row) -> tuple[list[Row], Diagnosis | None]:
        """Reasons for the winner's runners-up; the closest of each family get a closer look first."""
        by_family: dict[Family, int] = {}
        chosen: list[Row] = []
        for row in sorted(rows, key=lambda r: (-r.score, -(r.entry.bound if r.entry else 0.0))):
            count = by_family.get(row.deployment.family, 0)
            if row is winner or count <= RUNNERS_UP:
                chosen.append(row)
                by_family[row.deployment.family] = count + 1
        rate_of = {id(row): _rate_to_look_at(row, self.objective) for row in chosen}
        looked_at = [row for row in chosen if rate_of[id(row)] > 0]
        looks = self.workers.map(
            [DiagnosisTask(row.deployment, rate_of[id(row)], row is winner) for row in looked_at]
        )
        found = {
            id(row): look for row, look in zip(looked_at, looks, strict=True) if isinstance(look, Diagnosis)
        }
        best = winner.entry.rate / winner.deployment.devices if winner.entry is not None else 0.0
        explained = [self._explained(row, winner, best, found.get(id(row))) for row in chosen]
        return explained, found.get(id(winner))

    def _explained(self, row: Row, winner: Row, best: float, look: Diagnosis | None) -> Row:
        if row is winner:
            text = "best"
        elif row.entry is None:
            share = winner.score and row.score / winner.score
            text = f"{100 * share:.0f} % of the best; {row.reason}"
        elif self.objective.kind == "least-devices" and row.entry.rate > 0:
            text = f"needs {row.deployment.devices} devices, the best {winner.deployment.devices}"
            if row.deployment.devices == winner.deployment.devices and row.entry.at and winner.entry:
                theirs = winner.entry.at.both if winner.entry.at else 0.0
                met = f"{100 * row.entry.at.both:.1f} %, the best {100 * theirs:.1f} %"
                text = f"as many devices; meets both for {met}"
        else:
            text = reason(row.entry, self.problem.slo, best, look)
        if self.objective.kind in ("cluster", "slo-scale", "throughput"):
            left = self.problem.cluster.num_devices - row.deployment.devices
            text += f"; {left} devices left over" if left else ""
        return Row(row.deployment, row.score, row.figure, text, row.entry)

    def nothing_found(self, rows: Sequence[Row]) -> str:
        slo = self.problem.slo
        seen = [
            (look.both, row.deployment, look)
            for row in rows
            if row.entry is not None and (look := row.entry.lone or row.entry.above) is not None
        ]
        what = "no placement meets the objectives"
        if self.objective.kind == "least-devices":
            what = (
                f"rate={self.objective.rate}: {what} with {self.problem.cluster.num_devices} devices; add "
                "some, or see how much these can do with --objective cluster"
            )
        if not seen:
            return what
        both, deployment, look = max(seen, key=lambda item: item[0])
        return f"{what}; the closest is {deployment} with {100 * both:.0f} % of requests: {missed(look, slo)}"

    def notes(self, winner: Row) -> tuple[str, ...]:
        notes = []
        for _, group in winner.deployment.groups:
            degree = self.problem.latency.degree(group.shape.tp)
            if degree.predicted:
                notes.append(
                    f"times for tp={group.shape.tp} are predicted, not measured: {degree.note or ''}".rstrip(
                        ": "
                    )
                )
        return tuple(dict.fromkeys(notes))


def _best_first(row: Row) -> tuple[float, bool, int, str]:
    """By score; of equals the one that a long run has confirmed, then the one with fewer devices."""
    confirmed = row.entry is not None and row.entry.long
    return (-row.score, not confirmed, row.deployment.devices, str(row.deployment))


def _rate_to_look_at(row: Row, objective: Objective) -> float:
    if row.entry is None:
        return objective.rate or 0.0
    if row.entry.rate > 0:
        return row.entry.rate
    return row.entry.floor if row.entry.tried else 0.0


def unified_bounds(problem: Problem, family: Family, fitting: Sequence[Shape]) -> list[Candidate]:
    """Bounded units of one colocated policy."""
    return bounded_unified(problem, [u for u in unified_units(problem, fitting) if u.family == family])
