"""Decode time in closed form: k rounds of a batch cost the same arithmetic as one."""

from __future__ import annotations

from math import sqrt

from distserve_planner.instance_latency import InstanceLatency

FIRST_TABLE = 64
PROBE_TOKENS = float(1 << 20)  # where the context slope is read off; times are linear in context


class DecodeRounds:
    """Times of decode rounds of one instance; a round gives every running request one token.

    With pp stages the running requests are spread over min(pp, B) micro-batches that follow each other
    through the pipeline. A micro-batch may start its next token when its last one has left the final stage,
    so a round takes the longer of one trip through all stages with its hops, and of the micro-batches passing
    the slowest stage. Contexts are taken as evenly spread. All times are linear in the context:
    round(B, c) = fixed[B] + slope[B] c, with c counting the token that the round computes.
    """

    __slots__ = ("_latency", "fixed", "half", "slope")

    def __init__(self, latency: InstanceLatency) -> None:
        self._latency = latency
        self.fixed: list[float] = [0.0]
        self.slope: list[float] = [0.0]
        self.half: list[float] = [0.0]  # slope[B] B / 2
        self.grow(FIRST_TABLE)

    def grow(self, batch: int) -> None:
        """Tabulates up to at least `batch`."""
        for size in range(len(self.fixed), max(batch, 2 * len(self.fixed)) + 1):
            fixed, slope = self._round(size)
            self.fixed.append(fixed)
            self.slope.append(slope)
            self.half.append(slope * size / 2)

    def _round(self, size: int) -> tuple[float, float]:
        latency = self._latency
        if latency.pp == 1:
            return _linear(latency.decode_stage_s, size)
        groups = min(latency.pp, size)
        largest = -(-size // groups)
        trip, trip_slope = _linear(latency.decode_total_s, largest)
        stage, stage_slope = _linear(latency.decode_stage_s, largest)
        return max(trip, groups * stage), max(trip_slope / groups, stage_slope)

    def span_s(self, batch: int, context: int, steps: int) -> float:
        """`steps` rounds from `context` tokens on, each adding `batch`: k F + S k c + S B k (k - 1) / 2."""
        if batch >= len(self.fixed):
            self.grow(batch)
        return steps * (self.fixed[batch] + self.slope[batch] * context + self.half[batch] * (steps - 1))

    def steps_within(self, batch: int, context: int, seconds: float) -> int:
        """Whole rounds that end within `seconds`: the positive root of `span_s` = seconds, rounded down."""
        if batch >= len(self.fixed):
            self.grow(batch)
        half = self.half[batch]
        first = self.fixed[batch] + self.slope[batch] * context
        linear = first - half
        steps = int(
            (sqrt(linear * linear + 4 * half * seconds) - linear) / (2 * half)
            if half > 0
            else seconds / first
        )
        # the root is within rounding of a whole number when a round ends just then
        if (steps + 1) * (first + half * steps) <= seconds:
            return steps + 1
        if steps and steps * (first + half * (steps - 1)) > seconds:
            return steps - 1
        return steps


def _linear(time: object, size: int) -> tuple[float, float]:
    assert callable(time)
    fixed = time(size, 0.0)
    return fixed, (time(size, PROBE_TOKENS) - fixed) / PROBE_TOKENS
