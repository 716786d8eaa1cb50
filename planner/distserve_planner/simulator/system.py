"""A whole deployment in the simulation: arrivals, dispatch, transfers, and when to stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from distserve_planner.simulator.clock import Clock
from distserve_planner.simulator.decode import DecodeInstance
from distserve_planner.simulator.prefill import PrefillInstance
from distserve_planner.simulator.records import Outcome, Records, Tracked
from distserve_planner.simulator.spec import Route, SystemSpec
from distserve_planner.simulator.transfer import Links
from distserve_planner.simulator.unified import UnifiedInstance

_NO_WAY = Route()


class Simulation:
    """Runs a trace through a system, as far as asked; the same input gives the same result, bit for bit.

    Requests wait in one FCFS queue and are bound late: to the prefill instance with the least work (tokens
    waiting and in computation) among those that have room for it; a prompt longer than that goes to an idle
    one. Decode goes to the instance with the fewest requests. Prefill blocks are held until the KV has been
    pulled.
    """

    def __init__(
        self,
        system: SystemSpec,
        arrival_s: Sequence[float],
        input_tokens: Sequence[int],
        output_tokens: Sequence[int],
        max_tokens: Sequence[int] | None = None,
    ) -> None:
        """Sequences of one length, by order of arrival. max_tokens: what the client allows; default: what
        comes out."""
        self.system = system
        self.clock = Clock()
        self.links = Links()
        self._arrival = list(arrival_s)
        self._input = list(input_tokens)
        self._output = list(output_tokens)
        self._max_tokens = self._output if max_tokens is None else list(max_tokens)
        self.records = Records(self._arrival, self._output)
        self._next = 0  # of the arrivals
        self._stop = 0  # `run` ends when requests before this index have ended
        self._open = 0  # of those, still on their way
        self._ended = bytearray(len(self._arrival))
        self._queue: deque[Tracked] = deque()
        self._holders: dict[str, tuple[PrefillInstance, Tracked]] = {}
        late = self._dispatch if len(system.prefill) > 1 else None
        self.prefill = [
            PrefillInstance(i, spec, self.clock, self.records, self._prefilled, late)
            for i, spec in enumerate(system.prefill)
        ]
        self.decode = [
            DecodeInstance(i, spec, self.clock, self.records, self._pull, self._done)
            for i, spec in enumerate(system.decode)
        ]
        self.unified = [
            UnifiedInstance(i, spec, system.policy, self.clock, self.records, self._done)
            for i, spec in enumerate(system.unified)
        ]
        everywhere = range(len(self.decode))
        self._choices = [
            [self.decode[j] for j in system.targets.get(i, everywhere)] for i in range(len(self.prefill))
        ]
        self._longest_prompt = min((s.kv_tokens for s in system.prefill), default=1 << 60)
        self._longest = min((s.kv_tokens for s in system.decode + system.unified), default=1 << 60)

    @property
    def arrivals(self) -> int:
        """Requests in the trace."""
        return len(self._arrival)

    def run(self, count: int | None = None) -> None:
        """Goes on until the first `count` requests (default: all) have ended; later ones arrive meanwhile."""
        self._stop = len(self._arrival) if count is None else count
        self._open = self._stop - sum(self._ended[: self._stop])
        clock = self.clock
        heap, step = clock.heap, clock.step
        arrival = self._arrival
        total = len(arrival)
        arrives = arrival[self._next] if self._next < total else inf
        while self._open:
            if heap and heap[0][0] <= arrives:
                step()
            elif arrives < inf:
                clock.now = arrives
                self._arrive(self._next)
                arrives = arrival[self._next] if self._next < total else inf
            else:
                raise RuntimeError(f"the simulation stalled at {clock.now} s with {self._open} requests open")

    def outcome(self, first: int = 0, last: int | None = None) -> Outcome:
        """Times of requests `first` to `last` - 1, which must have ended."""
        return self.records.window(first, self._stop if last is None else last)

    def _arrive(self, index: int) -> None:
        self._next = index + 1
        prompt, output = self._input[index], self._output[index]
        if prompt > self._longest_prompt or prompt + output > self._longest:
            self.records.refused.add(index)
            self._end(index)
            return
        request = Tracked(str(index), prompt, self._max_tokens[index], self.clock.now, stop_after=output)
        request.index = index
        if self.prefill:
            if len(self.prefill) == 1:
                self.prefill[0].offer(request)  # its own queue is the central one
            else:
                self._queue.append(request)
                self._dispatch()
        elif self.unified:
            min(self.unified, key=_load).offer(request)
        else:
            self._decode_only(request)

    def _decode_only(self, request: Tracked) -> None:
        records = self.records
        index = request.index
        now = self.clock.now
        records.started[index] = records.first[index] = now
        request.generated = 1
        request.computed = request.prompt_len
        if request.stop_after == 1:
            records.admitted[index] = records.ready[index] = records.finish[index] = now
            self._end(index)
        else:
            min(self.decode, key=_load).offer(request)

    def _dispatch(self) -> None:
        queue = self._queue
        while queue:
            best: PrefillInstance | None = None
            for instance in self.prefill:
                if best is None or instance.work < best.work:
                    room = instance.scheduler.credits()
                    if queue[0].prompt_len <= room or (room > 0 and not instance.work):
                        best = instance
            if best is None:
                return
            best.offer(queue.popleft())

    def _prefilled(self, source: PrefillInstance, request: Tracked) -> None:
        """First token: the request ends here, or goes to a decode instance."""
        index = request.index
        records = self.records
        if request.stop_after == 1 or not self.decode:
            now = self.clock.now
            records.admitted[index] = records.ready[index] = records.finish[index] = now
            if request.stop_after > 1:
                source.scheduler.release(request)
            self._end(index)
            return
        incoming = Tracked(
            request.id,
            request.prompt_len,
            request.max_tokens,
            request.arrival_s,
            stop_after=request.stop_after,
            generated=1,
            computed=request.computed,
        )
        incoming.index = index
        self._holders[request.id] = (source, request)
        choices = self._choices[source.index]
        (choices[0] if len(choices) == 1 else min(choices, key=_load)).offer(incoming)

    def _pull(self, target: DecodeInstance, request: Tracked, when: float) -> None:
        """Moves the KV of an admitted request; `when` may lie ahead of the clock, at the end of a round."""
        self.records.ready[request.index] = when
        holder = self._holders.get(request.id)
        route = (
            _NO_WAY if holder is None else self.system.routes.get((holder[0].index, target.index), _NO_WAY)
        )
        if route is _NO_WAY:
            self._pulled((target, request))
            return
        arrives = self.links.transfer(route, request.computed, when)
        self.records.ready[request.index] = arrives
        self.clock.at(arrives, self._pulled, (target, request))

    def _pulled(self, argument: tuple[DecodeInstance, Tracked]) -> None:
        target, request = argument
        holder = self._holders.pop(request.id, None)
        if holder is not None:
            holder[0].release(holder[1])
        target.arrived(request)

    def _done(self, request: Tracked) -> None:
        if request.preemptions:
            self.records.preemptions[request.index] = request.preemptions
        self._end(request.index)

    def _end(self, index: int) -> None:
        self._ended[index] = 1
        if index < self._stop:
            self._open -= 1


def _load(instance: DecodeInstance | UnifiedInstance) -> int:
    return instance.load
