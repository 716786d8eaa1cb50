"""An engine's steps held against its profile: how much longer they take than when measured alone."""

from __future__ import annotations

from collections.abc import Sequence
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
    prefill = _ratio(latency, [s for (tokens, _), s in count.step_times.items() if tokens], clock)
    decode = _ratio(latency, [s for (tokens, _), s in count.step_times.items() if not tokens], clock)
    steps = count.totals["steps"]
    return Pace(
        prefill=prefill or decode or 1.0,
        decode=decode or prefill or 1.0,
        iteration_s=count.totals["loop_s"] / steps if steps else 0.0,
    )


@dataclass(frozen=True)
class Contention:
    """What two engines do to each other's steps, in processor time: they share their memory and last cache.

    `alone`: the pace while the other core idles. `prefill`, `decode`: times that while it computes.
    """

    alone: Pace = PROFILED
    prefill: float = 1.0
    decode: float = 1.0

    def pace(self, other_busy: float) -> Pace:
        """While the other engine computes for this share of the time."""
        return Pace(
            self.alone.prefill * (1 + (self.prefill - 1) * other_busy),
            self.alone.decode * (1 + (self.decode - 1) * other_busy),
            self.alone.iteration_s,
        )


UNDISTURBED = Contention()


def fit_contention(profile: Profile, lone: Counters, busy: Sequence[tuple[Counters, float]]) -> Contention:
    """From the engines' counts of lone requests, and of runs under load with their wall seconds.

    The machine's speed drifts, so it may have been slower during the lone requests: then they tell nothing of
    the engines' influence on each other, and the pace under load is that of all times.
    """
    alone = measured_pace(profile, merged(lone.values()), "cpu_s")
    loaded = measured_pace(profile, merged(c for counters, _ in busy for c in counters.values()), "cpu_s")
    prefill, decode = min(alone.prefill, loaded.prefill), min(alone.decode, loaded.decode)
    return Contention(
        replace(alone, prefill=prefill, decode=decode),
        _factor(loaded.prefill / prefill, _other_busy(busy, prompts=True)),
        _factor(loaded.decode / decode, _other_busy(busy, prompts=False)),
    )


def _factor(longer: float, other_busy: float) -> float:
    return 1 + (longer - 1) / other_busy if other_busy > 0 else 1.0


def _other_busy(runs: Sequence[tuple[Counters, float]], prompts: bool) -> float:
    """Share of the time in which the other engine computes, seen by steps with (or without) prompts."""
    seen = total = 0.0
    for counters, wall in runs:
        for name, count in counters.items():
            steps_s = sum(s.wall_s for (tokens, _), s in count.step_times.items() if bool(tokens) == prompts)
            others = sum(c.totals["execute_s"] for other, c in counters.items() if other != name)
            seen += steps_s * min(1.0, others / wall)
            total += steps_s
    return seen / total if total else 0.0


def processor_share(count: EngineCount) -> float:
    """Of the wall time of an engine's steps, the part in which it had its core; 1 without steps."""
    wall = sum(sums.wall_s for sums in count.step_times.values())
    return sum(sums.cpu_s for sums in count.step_times.values()) / wall if wall else 1.0


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
        )
        for s in classes
    )
    return sum(getattr(s, clock) for s in classes) / profiled if profiled > 0 else None


def _times(piece: Piece, factor: float) -> Piece:
    """The fields of a coefficient row that are seconds."""
    scaled = {f.name: factor * getattr(piece, f.name) for f in fields(piece) if f.name.endswith("_s")}
    return replace(piece, **scaled)
