"""A whole deployment in the simulation: arrivals, dispatch, transfers, and when to stop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from math import inf

from distserve.core.dispatch import Binding, DecodeLoad, bind_in_order, choose_decode, choose_prefill
from distserve.core.order import Key, Ordering, insert
from distserve_planner.simulator.clock import Clock
from distserve_planner.simulator.decode import DecodeInstance
from distserve_planner.simulator.pipelined import PipelinedDecode, PipelinedUnified
from distserve_planner.simulator.prefill import PrefillInstance
from distserve_planner.simulator.records import Outcome, Records, Tracked
from distserve_planner.simulator.spec import Route, SystemSpec
from distserve_planner.simulator.transfer import Links
from distserve_planner.simulator.unified import UnifiedInstance

_NO_WAY = Route()
AnyDecode = DecodeInstance | PipelinedDecode
PromptInstance = PrefillInstance | UnifiedInstance | PipelinedUnified


class Simulation:
    """Runs a trace through a system, as far as asked; the same input gives the same result, bit for bit.

    Requests wait in one queue and are bound late, as the orchestrator binds them: both choose by
    `distserve.core.dispatch`. Prefill blocks are held until the KV has been pulled.
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
        self._queue: list[Tracked] = []
        self._dispatching = self._again = False
        self._holders: dict[str, tuple[PrefillInstance, Tracked]] = {}
        late = self._dispatch if self._needs_queue() else None
        self.prefill = [
            PrefillInstance(i, spec, self.clock, self.records, self._prefilled, late)
            for i, spec in enumerate(system.prefill)
        ]
        self.decode = [
            (DecodeInstance if spec.latency.pp == 1 else PipelinedDecode)(
                i, spec, self.clock, self.records, self._pull, self._done
            )
            for i, spec in enumerate(system.decode)
        ]
        self.unified = [
            (UnifiedInstance if spec.latency.pp == 1 else PipelinedUnified)(
                i, spec, system.policy, self.clock, self.records, self._done, late
            )
            for i, spec in enumerate(system.unified)
        ]
        self._first: Sequence[PromptInstance] = self.prefill or self.unified
        self._late = late is not None
        everywhere = range(len(self.decode))
        self._choices = [
            [self.decode[j] for j in system.targets.get(i, everywhere)] for i in range(len(self.prefill))
        ]
        self._longest_prompt, self._any_prompt = _range(s.kv_tokens for s in system.prefill)
        self._longest, self._any = _range(s.kv_tokens for s in chain(system.decode, system.unified))

    def _needs_queue(self) -> bool:
        """Not where the queue of the only instance can stand for it: the order is the same."""
        system = self.system
        if len(system.prefill) + len(system.unified) > 1:
            return True
        own = [spec.ordering for spec in system.prefill] or [Ordering()]  # unified: first come, first served
        return own != [system.ordering]

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
        prompt, output, allowed = self._input[index], self._output[index], self._max_tokens[index]
        if prompt > self._any_prompt or prompt + allowed > self._any:
            self.records.refused.add(index)
            self._end(index)
            return
        request = Tracked(str(index), prompt, allowed, self.clock.now, stop_after=output)
        request.index = index
        if not self._first:
            self._decode_only(request)
        elif self._late:
            insert(self._queue, request, self._key)
            self._dispatch()
        else:
            self._first[0].offer(request)

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
            self._to_decode(self.decode, request)

    def _dispatch(self) -> None:
        """Binds what can be bound now. An instance that starts a batch meanwhile asks again."""
        self._again = bool(self._queue)
        if self._dispatching:
            return
        self._dispatching = True
        while self._again:
            self._again = False
            bind_in_order(self._queue, self._bind)
        self._dispatching = False

    def _bind(self, request: Tracked, stuck: bool) -> Binding:
        prompt = request.prompt_len
        instances = self._first
        if prompt > self._longest_prompt or prompt + request.max_tokens > self._longest:
            instances = [i for i in instances if self._holds(i, request)]
        in_pieces = any(instance.in_pieces(prompt) for instance in instances)
        index = None
        if not (in_pieces and stuck):
            index = choose_prefill(prompt, (instance.prompt_load() for instance in instances))
        if index is None:
            return Binding.LONG if in_pieces else Binding.BLOCKS
        instances[index].offer(request)
        return Binding.BOUND

    def _holds(self, instance: PromptInstance, request: Tracked) -> bool:
        tokens = request.prompt_len + (0 if self.prefill else request.max_tokens)
        return instance.kv_tokens >= tokens

    def _key(self, request: Tracked) -> Key:
        # all requests have the same objective, so what is due first has come first
        arrival_s = request.arrival_s
        return self.system.ordering.key(request.priority, request.prompt_len, arrival_s, arrival_s)

    def _to_decode(self, choices: Sequence[AnyDecode], request: Tracked) -> None:
        if request.prompt_len + request.max_tokens > self._longest:
            choices = [d for d in choices if d.kv_tokens >= request.prompt_len + request.max_tokens]
        index = 0
        if len(choices) > 1:
            index = choose_decode(DecodeLoad(d.load, d.max_batch_size) for d in choices) or 0
        choices[index].offer(request)

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
        self._to_decode(self._choices[source.index], incoming)

    def _pull(self, target: AnyDecode, request: Tracked, when: float) -> None:
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

    def _pulled(self, argument: tuple[AnyDecode, Tracked]) -> None:
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


def _range(pools: Iterable[int]) -> tuple[int, int]:
    """Tokens that fit on each of some instances, and on some of them."""
    sizes = list(pools) or [1 << 60]
    return min(sizes), max(sizes)
