"""The authors' decode instance: batches go round a ring of stages and merge where they queue."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import inf

from distserve_planner.simulator.authors import DECODE_TOKENS, AuthorsPhase, span_s, whole_rounds


class Group:
    """Requests that decode together. `ends`: (round of this group after which it ends, request)."""

    __slots__ = ("context", "ends", "members", "rounds")

    def __init__(self, request: int, context: int, output: int) -> None:
        self.members = deque((request,))
        self.context = context
        self.rounds = 0
        self.ends: list[tuple[int, int]] = [(output, request)]


def merged(groups: list[Group]) -> Group:
    """One group with the members of all in order; the largest takes the others in."""
    base = groups[0]
    if len(groups) == 1:
        return base
    position = 0
    for index, group in enumerate(groups):
        if len(group.members) > len(base.members):
            base, position = group, index
    for group in reversed(groups[:position]):
        base.members.extendleft(reversed(group.members))
        _absorb(base, group)
    for group in groups[position + 1 :]:
        base.members.extend(group.members)
        _absorb(base, group)
    return base


def _absorb(base: Group, other: Group) -> None:
    base.context += other.context
    shift = base.rounds - other.rounds
    for end, request in other.ends:
        heappush(base.ends, (end + shift, request))


def split(groups: list[Group], inputs: list[int], outputs: list[int]) -> tuple[Group, list[Group]]:
    """First in, first out, as many members as `DECODE_TOKENS` allows; and what stays in the queue."""
    taken: list[Group] = []
    tokens = 0
    for index, group in enumerate(groups):
        size = len(group.members)
        if tokens + group.context + size <= DECODE_TOKENS:
            tokens += group.context + size
            taken.append(group)
            continue
        left = {request: end - group.rounds for end, request in group.ends}
        members = [(r, inputs[r] + outputs[r] - left[r]) for r in group.members]
        here = 0
        while here < size and tokens + members[here][1] + 1 <= DECODE_TOKENS:
            tokens += members[here][1] + 1
            here += 1
        parts = [_part(part, left) for part in (members[:here], members[here:]) if part]
        return merged(taken + parts[: bool(here)]), parts[bool(here) :] + groups[index + 1 :]
    return merged(taken), []


def _part(members: list[tuple[int, int]], left: dict[int, int]) -> Group:
    group = Group(members[0][0], 0, 0)
    group.members = deque(request for request, _ in members)
    group.context = sum(context for _, context in members)
    group.ends = sorted((left[request], request) for request, _ in members)
    return group


def decode_times(
    phase: AuthorsPhase, ready: list[float], inputs: list[int], outputs: list[int]
) -> list[float]:
    """When each request ends that enters at `ready` (not falling)."""
    last = list(ready)
    order = [request for request in range(len(ready)) if outputs[request]]
    if order:
        _Ring(phase, ready, inputs, outputs, last).run(order)
    return last


class _Ring:
    __slots__ = ("inputs", "last", "outputs", "phase", "queues", "ready", "stage_s")

    def __init__(
        self,
        phase: AuthorsPhase,
        ready: list[float],
        inputs: list[int],
        outputs: list[int],
        last: list[float],
    ) -> None:
        self.phase = phase
        self.ready, self.inputs, self.outputs, self.last = ready, inputs, outputs, last
        self.queues: list[list[Group]] = [[] for _ in range(phase.pp)]
        self.stage_s: dict[tuple[int, bool], tuple[float, float]] = {}

    def run(self, order: list[int]) -> None:
        """Stage by stage; a group that is alone goes round in closed form."""
        pp = self.phase.pp
        final = pp - 1
        queues, ready, inputs, outputs = self.queues, self.ready, self.inputs, self.outputs
        busy = [inf] * pp
        at: list[Group | None] = [None] * pp
        position, total = 0, len(order)
        arrives = ready[order[0]]
        while True:
            now = min(busy)
            if arrives <= now:
                if arrives == inf:
                    return
                now = arrives
                while arrives == now:  # the prompts of one batch are there together
                    request = order[position]
                    queues[0].append(Group(request, inputs[request], outputs[request]))
                    position += 1
                    arrives = ready[order[position]] if position < total else inf
                if busy[0] == inf:
                    at[0], busy[0] = self._start(0, now, arrives, at)
                continue
            stage = busy.index(now)
            group = at[stage]
            assert group is not None
            busy[stage], at[stage] = inf, None
            following = stage + 1
            if stage == final:
                following = 0
                self._end_round(group, now)
            if group.members:
                queues[following].append(group)
                if busy[following] == inf:
                    at[following], busy[following] = self._start(following, now, arrives, at)
            if queues[stage] and busy[stage] == inf:
                at[stage], busy[stage] = self._start(stage, now, arrives, at)

    def _start(self, stage: int, now: float, arrives: float, at: list[Group | None]) -> tuple[Group, float]:
        """Takes what is queued; returns it with the time at which it leaves the stage."""
        groups = self.queues[stage]
        group = groups[0]
        if len(groups) > 1 or group.context + len(group.members) > DECODE_TOKENS:
            tokens = sum(g.context + len(g.members) for g in groups)
            if tokens > DECODE_TOKENS:
                group, self.queues[stage] = split(groups, self.inputs, self.outputs)
            else:
                group, self.queues[stage] = merged(groups), []
        else:
            self.queues[stage] = []
        size = len(group.members)
        fixed, slope = self._coefficients(size, stage == 0)
        if stage == 0 and not self.queues[0] and self._alone(at):
            now = self._skip(group, size, fixed, slope, now, arrives)
        return group, now + fixed + slope * group.context

    def _alone(self, at: list[Group | None]) -> bool:
        return not any(at) and not any(self.queues)

    def _skip(self, group: Group, size: int, fixed: float, slope: float, now: float, arrives: float) -> float:
        """Whole rounds before the next arrival and before the last round of a member, at once."""
        pp = self.phase.pp
        if pp > 1:
            other_fixed, other_slope = self._coefficients(size, False)
            fixed += (pp - 1) * other_fixed
            slope += (pp - 1) * other_slope
        rounds = group.ends[0][0] - group.rounds - 1
        rounds = min(rounds, (DECODE_TOKENS - group.context - size) // size)
        if rounds > 0 and arrives < inf:
            rounds = min(rounds, whole_rounds(arrives - now, fixed, slope, group.context, size))
        if rounds <= 0:
            return now
        now += span_s(rounds, fixed, slope, group.context, size)
        group.rounds += rounds
        group.context += rounds * size
        return now

    def _coefficients(self, size: int, first: bool) -> tuple[float, float]:
        key = (size, first)
        found = self.stage_s.get(key)
        if found is None:
            found = self.stage_s[key] = self.phase.stage_s(size, first)
        return found

    def _end_round(self, group: Group, now: float) -> None:
        group.rounds += 1
        group.context += len(group.members)
        ends = group.ends
        while ends and ends[0][0] <= group.rounds:
            _, request = heappop(ends)
            group.members.remove(request)
            group.context -= self.inputs[request] + self.outputs[request]
            self.last[request] = now
