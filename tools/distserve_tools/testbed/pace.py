"""An engine's steps held against its profile: how much longer they take than when measured alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar

from distserve.engine.step_times import StepSums
from distserve_planner.coefficients import DecodePiece, HeadCost, PrefillPiece
from distserve_planner.instance_latency import InstanceLatency, Overhead
from distserve_planner.profile_file import Profile
from distserve_tools.testbed.engine_counters import Counters, EngineCount, merged

Piece = TypeVar("Piece", PrefillPiece, DecodePiece, HeadCost)
Clock = Literal["wall_s", "cpu_s"]


@dataclass(frozen=True)
class Pace:
    """`prefill`, `decode`: a step that computes prompts, and one that does not, takes so many times what the
    profile says. `iteration_s`: to every step on top, what the engine's loop takes between two.
    """

    prefill: float = 1.0
    decode: float = 1.0
    iteration_s: float = 0.0


PROFILED = Pace()


def measured_pace(profile: Profile, count: EngineCount, clock: Clock = "wall_s") -> Pace:
    """Of the steps that an engine has counted. A phase without steps goes at the other's pace.

    clock: with `cpu_s` the time in which the engine waited for its core is left out.
    """
    latency = profile.latency_model().instance(1)
    prefill = _ratio(latency, count.steps(prompts=True), clock)
    decode = _ratio(latency, count.steps(prompts=False), clock)
    steps = count.totals["steps"]
    return Pace(
        prefill=prefill or decode or 1.0,
        decode=decode or prefill or 1.0,
        iteration_s=count.totals["loop_s"] / steps if steps else 0.0,
    )


@dataclass(frozen=True)
class Contention:
    """What takes from an engine's steps while it serves.

    `alone`: the pace while the other core idles. `prefill`, `decode`: times that while it computes, too, as
    the two share their memory and last cache; both in processor time. `prefill_loss`, `decode_loss`: of every
    core that work beside the engines takes, the part that is lost to steps of the phase.
    """

    alone: Pace = PROFILED
    prefill: float = 1.0
    decode: float = 1.0
    prefill_loss: float = 0.5
    decode_loss: float = 0.5

    def pace(self, other_busy: float, taken_cores: float) -> Pace:
        """While the other engine computes for this share of the time; at worst as if an engine kept a quarter
        of its core.
        """
        memory_prefill = 1 + (self.prefill - 1) * other_busy
        memory_decode = 1 + (self.decode - 1) * other_busy
        return Pace(
            self.alone.prefill * memory_prefill / max(0.25, 1 - taken_cores * self.prefill_loss),
            self.alone.decode * memory_decode / max(0.25, 1 - taken_cores * self.decode_loss),
            self.alone.iteration_s,
        )


UNDISTURBED = Contention()


@dataclass(frozen=True)
class LoadedRun:
    """What `fit_contention` takes from a run. taken_cores: by everything but the engines."""

    engines: Counters
    wall_s: float
    taken_cores: float


def fit_contention(profile: Profile, lone: Counters, busy: Sequence[LoadedRun]) -> Contention:
    """From the engines' counts of lone requests, and of runs under load.

    The machine's speed drifts, so it may have been slower during the lone requests: then they tell nothing of
    the engines' influence on each other, and the pace under load is that of all times.
    """
    alone = measured_pace(profile, merged(lone.values()), "cpu_s")
    loads = merged(count for run in busy for count in run.engines.values())
    loaded = measured_pace(profile, loads, "cpu_s")
    prefill, decode = min(alone.prefill, loaded.prefill), min(alone.decode, loaded.decode)
    taken = statistics.mean(run.taken_cores for run in busy)
    return Contention(
        replace(alone, prefill=prefill, decode=decode),
        _factor(loaded.prefill / prefill, _other_busy(busy, prompts=True)),
        _factor(loaded.decode / decode, _other_busy(busy, prompts=False)),
        _loss(loads.steps(prompts=True), taken),
        _loss(loads.steps(prompts=False), taken),
    )


def _factor(longer: float, other_busy: float) -> float:
    return 1 + (longer - 1) / other_busy if other_busy > 0 else 1.0


def _loss(classes: Iterable[StepSums], taken_cores: float) -> float:
    return (1 - _on_core(classes)) / taken_cores if taken_cores > 0 else 0.0


def _other_busy(runs: Sequence[LoadedRun], prompts: bool) -> float:
    """Share of the time in which the other engine computes, seen by steps with (or without) prompts."""
    seen = total = 0.0
    for run in runs:
        for name, count in run.engines.items():
            steps_s = sum(s.wall_s for s in count.steps(prompts))
            others = sum(c.totals["execute_s"] for other, c in run.engines.items() if other != name)
            seen += steps_s * min(1.0, others / run.wall_s)
            total += steps_s
    return seen / total if total else 0.0


def _on_core(classes: Iterable[StepSums]) -> float:
    """Of the wall time of steps, the part in which they had their core; 1 without steps."""
    times = [(sums.cpu_s, sums.wall_s) for sums in classes]
    wall = sum(wall for _, wall in times)
    return min(1.0, sum(cpu for cpu, _ in times) / wall) if wall else 1.0


def processor_share(count: EngineCount) -> float:
    """Of the wall time of an engine's steps, the part in which it had its core; 1 without steps."""
    return _on_core(count.step_times.values())


def at_pace(profile: Profile, pace: Pace) -> Profile:
    """The profile with all step times longer by the pace's factors, and its loop's time."""
    degrees = tuple(
        replace(
            degree,
            prefill=tuple(_times(piece, pace.prefill) for piece in degree.prefill),
            decode=tuple(_times(piece, pace.decode) for piece in degree.decode),
            head=_times(degree.head, pace.decode),
        )
        for degree in profile.degrees
    )
    return replace(profile, degrees=degrees, overhead=Overhead(iteration_s=pace.iteration_s))


def _ratio(latency: InstanceLatency, classes: list[StepSums], clock: Clock) -> float | None:
    """Measured over profiled time. A class is costed at its mean: step times are near to linear in it."""
    profiled = sum(
        s.steps
        * latency.mixed_stage_s(
            s.prompt_tokens / s.steps,
            s.prompt_squares / s.steps,
            round(s.decodes / s.steps),
            s.context_tokens / s.steps,
            s.prompts / s.steps,
            s.prompt_ends / s.steps,
        )
        for s in classes
    )
    return sum(getattr(s, clock) for s in classes) / profiled if profiled > 0 else None


def _times(piece: Piece, factor: float) -> Piece:
    """The fields of a coefficient row that are seconds."""
    scaled = {f.name: factor * getattr(piece, f.name) for f in fields(piece) if f.name.endswith("_s")}
    return replace(piece, **scaled)
