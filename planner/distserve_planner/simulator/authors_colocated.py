"""The authors' colocated worker (their vLLM model): a ring of stages that put prompts before decoding."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from distserve_planner.simulator.authors import (
    DECODE_TOKENS,
    ITERATION_PER_TOKEN_S,
    ITERATION_S,
    PREFILL_STAGE_S,
    AuthorsPhase,
    span_s,
    whole_rounds,
)
from distserve_planner.simulator.authors_ring import Group, merged, split


def colocated_times(
    phase: AuthorsPhase, arrival: list[float], inputs: list[int], outputs: list[int]
) -> tuple[list[float], list[float]]:
    """When each request has its first token, and when it ends.

    Raises `ValueError` for a prompt above the budget.
    """
    run = _Run(phase, arrival, inputs, outputs)
    run.run()
    return run.first, run.last


class _Stage:
    """One worker: a tensor-parallel group."""

    __slots__ = ("busy", "decodes", "first", "last", "next", "plan", "prompts", "span")

    def __init__(self) -> None:
        self.prompts: deque[int] | deque[list[int]] = deque()
        self.decodes: list[Group] = []
        self.busy = False
        self.first = self.last = False
        self.next: _Stage = self
        self.plan = 0
        self.span: tuple[float, Group, int, float, float] | None = None  # start, group, rounds, F, S


class _Run:
    def __init__(
        self, phase: AuthorsPhase, arrival: list[float], inputs: list[int], outputs: list[int]
    ) -> None:
        self.phase = phase
        self.arrival, self.inputs, self.outputs = arrival, inputs, outputs
        self.first = [0.0] * len(arrival)
        self.last = [0.0] * len(arrival)
        self.heap: list[tuple[float, int, int, _Stage, object]] = []
        self.count = 0
        self.now = 0.0
        self.head = _ring(phase.pp)[0]

    def run(self) -> None:
        arrival, heap, head = self.arrival, self.heap, self.head
        position, total = 0, len(arrival)
        while heap or position < total:
            if position < total and (not heap or arrival[position] <= heap[0][0]):
                self.now = arrival[position]
                head.prompts.append(position)  # type: ignore[arg-type]
                position += 1
                self._wake(head)
                continue
            self.now, _, kind, stage, what = heappop(heap)
            if kind == _PREFILL:
                self._prefill_end(stage, what)  # type: ignore[arg-type]
            elif stage.plan == what:
                self._decode_end(stage)

    def _at(self, time: float, kind: int, stage: _Stage, what: object) -> None:
        self.count += 1
        heappush(self.heap, (time, self.count, kind, stage, what))

    def _wake(self, stage: _Stage) -> None:
        if not stage.busy:
            self._begin(stage)
        elif stage.span is not None and stage.span[2] > 1:
            self._cut(stage)

    def _begin(self, stage: _Stage) -> None:
        """The worker's loop: prompts first."""
        stage.busy = True
        if stage.prompts:
            self._prefill_begin(stage)
        elif stage.decodes:
            self._decode_begin(stage)
        else:
            stage.busy = False

    def _prefill_begin(self, stage: _Stage) -> None:
        inputs = self.inputs
        if stage.first:
            batch: list[int] = []
            budget = self.phase.kv_tokens
            while stage.prompts and inputs[stage.prompts[0]] <= budget:  # type: ignore[index]
                request: int = stage.prompts.popleft()  # type: ignore[assignment]
                budget -= inputs[request]
                batch.append(request)
            if not batch:
                raise ValueError(f"a prompt of {inputs[stage.prompts[0]]} tokens exceeds the budget")  # type: ignore[index]
        else:
            batch = stage.prompts.popleft()  # type: ignore[assignment]
        tokens = squares = 0
        for request in batch:
            tokens += inputs[request]
            squares += inputs[request] ** 2
        pp, piece = self.phase.pp, self.phase.degree.prefill_piece(1)
        took = (piece.base_s + piece.per_token_s * tokens + piece.per_token_sq_s * squares) / pp
        took += PREFILL_STAGE_S * pp
        if stage.first:
            took += ITERATION_S + ITERATION_PER_TOKEN_S * tokens
        self._at(self.now + took, _PREFILL, stage, batch)

    def _prefill_end(self, stage: _Stage, batch: list[int]) -> None:
        now = self.now
        if not stage.last:
            stage.next.prompts.append(batch)  # type: ignore[arg-type]
            self._wake(stage.next)
            self._begin(stage)
            return
        head = self.head
        for request in batch:
            self.first[request] = self.last[request] = now
            if self.outputs[request]:
                head.decodes.append(Group(request, self.inputs[request], self.outputs[request]))
        if head is not stage:
            self._wake(head)
        self._begin(stage)

    def _decode_begin(self, stage: _Stage) -> None:
        group = self._take(stage)
        size = len(group.members)
        pp = self.phase.pp
        fixed, slope = self.phase.stage_s(size, stage.first)
        rounds = 1
        if pp == 1 and not stage.decodes:
            rounds = group.ends[0][0] - group.rounds
            # the batch must stay within the limit in its last round, too
            rounds = max(1, min(rounds, 1 + (DECODE_TOKENS - group.context - size) // size))
        stage.span = (self.now, group, rounds, fixed, slope)
        stage.plan += 1
        self._at(self.now + span_s(rounds, fixed, slope, group.context, size), _DECODE, stage, stage.plan)

    def _take(self, stage: _Stage) -> Group:
        """Merges what is queued, first in first out, up to `DECODE_TOKENS`."""
        groups = stage.decodes
        if sum(group.context + len(group.members) for group in groups) > DECODE_TOKENS:
            group, stage.decodes = split(groups, self.inputs, self.outputs)
            return group
        stage.decodes = []
        return merged(groups)

    def _cut(self, stage: _Stage) -> None:
        """Something has arrived: the span ends with the round in progress."""
        assert stage.span is not None
        start, group, rounds, fixed, slope = stage.span
        size = len(group.members)
        kept = whole_rounds(self.now - start, fixed, slope, group.context, size) + 1
        if kept < rounds:
            stage.span = (start, group, kept, fixed, slope)
            stage.plan += 1
            end = start + span_s(kept, fixed, slope, group.context, size)
            self._at(end, _DECODE, stage, stage.plan)

    def _decode_end(self, stage: _Stage) -> None:
        assert stage.span is not None
        _, group, rounds, _, _ = stage.span
        stage.span = None
        if stage.last:
            group.rounds += rounds
            group.context += rounds * len(group.members)
            ends = group.ends
            while ends and ends[0][0] <= group.rounds:
                _, request = heappop(ends)
                group.members.remove(request)
                group.context -= self.inputs[request] + self.outputs[request]
                self.last[request] = self.now
        if group.members:
            stage.next.decodes.append(group)
            if stage.next is not stage:
                self._wake(stage.next)
        self._begin(stage)


_PREFILL, _DECODE = 0, 1


def _ring(pp: int) -> list[_Stage]:
    stages = [_Stage() for _ in range(pp)]
    for index, stage in enumerate(stages):
        stage.next = stages[(index + 1) % pp]
    stages[0].first = stages[-1].last = True
    return stages
