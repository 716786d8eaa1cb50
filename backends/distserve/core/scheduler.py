"""What the three kinds of scheduler share: limits, the interface, and continuous batching.

A scheduler never reads a clock and never computes: the engine calls `schedule`, executes the batch and
calls `complete`; the simulator does the same and adds the time itself ("one scheduler, two clocks").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from distserve.core.batch import Batch, Item
from distserve.core.blocks import BlockPool, blocks_for
from distserve.core.config import EngineConfig
from distserve.core.decode_set import DecodeSet, horizon
from distserve.core.request import Request


@dataclass(frozen=True)
class Limits:
    """What bounds a batch. Tokens, except `max_batch_size` (requests)."""

    max_batch_size: int = 64  # requests decoding at once
    max_batch_tokens: int = 512  # Lm: prompts are batched up to this total, longer ones run alone
    chunk_tokens: int = 256  # chunked prefill: tokens of a step, decode tokens included
    reserve_tokens: int | None = 0  # output room assured at admission; None: all of max_tokens
    prefill_chunk_tokens: int | None = None  # prefill instances: pieces of prompts above max_batch_tokens

    @classmethod
    def of(cls, config: EngineConfig) -> Limits:
        return cls(
            config.max_batch_size,
            config.max_batch_tokens,
            config.chunk_tokens,
            config.reserve_tokens,
            config.prefill_chunk_tokens,
        )


class Scheduler(Protocol):
    """Common to prefill, decode and unified instances."""

    blocks: BlockPool

    def add(self, request: Request) -> None:
        """Takes a request into the queue."""
        ...

    def schedule(self) -> Batch | None:
        """The next batch, with its blocks allocated, or None if nothing (more) can run."""
        ...

    def complete(self, batch: Batch, finished: Collection[str] = (), steps: int = 1) -> list[Request]:
        """Books a computed batch (`steps` times, if it only decodes) and returns the requests that ended.

        `finished` are ids that ended early (end token). Ended requests are out of the scheduler.
        """
        ...

    def cancel(self, request_id: str) -> Request | None:
        """Takes a request out, whatever its state, but not while it is in flight. Its blocks are let go."""
        ...

    def preempted(self) -> list[Request]:
        """Requests preempted since the last call: their KV was dropped and will be computed again."""
        ...


class ContinuousBatching:
    """Waiting requests that still need a prefill here, and those that decode.

    The base of unified scheduling; on a decode instance only preempted requests wait here.

    With `stages` > 1 several batches are in flight, so the decoding requests are spread over as many
    micro-batches, whose turns come one after the other. `schedule` may then be called again before
    `complete`, and what becomes ready while its micro-batch is in flight joins the next one.
    """

    def __init__(self, limits: Limits, blocks: BlockPool, stages: int = 1) -> None:
        self.limits = limits
        self.blocks = blocks
        self.waiting: deque[Request] = deque()
        self.running = DecodeSet(blocks)  # the micro-batch whose turn is next; with one stage, the only one
        self._sets = deque([self.running, *(DecodeSet(blocks) for _ in range(stages - 1))])
        self._ready: deque[Request] = deque()  # have their KV, join when a micro-batch is not in flight
        self._prefilling: dict[str, Request] = {}  # in batches in flight
        self._preempted: list[Request] = []

    @property
    def waiting_tokens(self) -> int:
        return sum(request.known - request.computed for request in self.waiting)

    @property
    def decoding(self) -> int:
        """Requests in all micro-batches."""
        return sum(map(len, self._sets)) + len(self._ready)

    def credits(self) -> int:
        """Tokens of prompts that can be taken and start within the next two batches."""
        free = self.blocks.free * self.blocks.block_size
        return max(0, min(2 * self.limits.max_batch_tokens, free) - self.waiting_tokens)

    def preempted(self) -> list[Request]:
        out, self._preempted = self._preempted, []
        return out

    def fits(self, request: Request, held: int = 0) -> bool:
        """Whether a request can be admitted now, leaving the running ones a block each to grow into.

        `held` is the number of admitted requests that do not decode (being prefilled, or on transfer).
        """
        active = self.decoding + held
        if active >= self.limits.max_batch_size:
            return False
        room = request.max_tokens - request.generated
        if self.limits.reserve_tokens is not None:
            room = min(room, self.limits.reserve_tokens)
        need = blocks_for(request.known + room, self.blocks.block_size)
        headroom = active + 1 if active else 0
        return self.blocks.free - need >= headroom - request.num_blocks

    def enter(self, request: Request) -> None:
        """A request begins to decode; it owns exactly the blocks of its `computed` tokens."""
        idle = [running for running in self._sets if not running.begun]
        if idle:
            min(idle, key=len).join(request)
        else:
            self._ready.append(request)

    def preempt_for_growth(self) -> None:
        """Preempts the requests that joined last until the next decode step has its blocks."""
        while self.running.growth() > self.blocks.free:
            victim = self._victim()
            if victim is None:
                return
            self.drop_kv(victim)
            self.waiting.appendleft(victim)

    def _victim(self) -> Request | None:
        """Takes out the request to preempt: of this micro-batch if others are left in it, else of those that
        are not in flight either.
        """
        if len(self.running) > 1:
            return self.running.leave(self.running.last().id)
        if self._ready:
            return self._ready.pop()
        idle = [other for other in self._sets if other is not self.running and len(other) and not other.begun]
        return idle[-1].leave(idle[-1].last().id) if idle else None

    def drop_kv(self, request: Request) -> None:
        self.blocks.release(request)
        request.computed = 0
        request.preemptions += 1
        self._preempted.append(request)

    def decode_batch(self) -> Batch | None:
        """The next micro-batch, or None if none has requests, or blocks for them, and is not in flight."""
        for _ in range(len(self._sets)):
            current = self.running = self._sets[0]
            self._sets.rotate(-1)
            if current.begun:
                continue
            self._level(current)
            self.preempt_for_growth()
            if not len(current) or current.growth() > self.blocks.free:
                continue
            current.begin()
            self.running = self._sets[0]
            return Batch(decode=current)
        return None

    def rounds(self) -> int:
        """Steps of every micro-batch in flight that `skip` can take: nothing joins, ends or lacks blocks.

        0 while a prompt waits or is in flight, or a micro-batch with requests is not in flight.
        """
        sets = [one for one in self._sets if len(one)]
        settled = not (self.waiting or self._prefilling or self._ready) and all(one.begun for one in sets)
        return horizon(sets) - 1 if sets and settled else 0

    def skip(self, rounds: int) -> None:
        """So many steps of every micro-batch have ended, and their next ones have begun."""
        for one in self._sets:
            if len(one):
                one.advance(rounds)
                one.begin()

    def _level(self, current: DecodeSet) -> None:
        """Brings a micro-batch to its share of the decoding requests."""
        share = -(-self.decoding // len(self._sets))
        while len(current) < share and self._ready:
            current.join(self._ready.popleft())
        while len(current) > share:
            self._ready.append(current.leave(current.last().id))

    def prefill_batch(self, budget: int, held: int = 0) -> list[Item]:
        """Whole prompts, FCFS, up to `budget` tokens; a longer one runs alone."""
        items: list[Item] = []
        held += len(self._prefilling)
        while self.waiting:
            request = self.waiting[0]
            tokens = request.known - request.computed
            if (items and tokens > budget) or not self.fits(request, held + len(items)):
                break
            self.waiting.popleft()
            take_blocks(self.blocks, request, request.known)
            items.append(Item(request, request.computed, tokens))
            budget -= tokens
        return items

    def begin_prefill(self, items: Collection[Item]) -> None:
        """The items' requests are in flight until `complete`."""
        self._prefilling.update((item.request.id, item.request) for item in items)

    def complete(self, batch: Batch, finished: Collection[str] = (), steps: int = 1) -> list[Request]:
        ended = []
        if batch.decode is not None:
            decoded = batch.decode
            ended = decoded.advance(steps)
            for request in ended:
                decoded.leave(request.id)
            ended += [decoded.leave(id) for id in finished if id in decoded]
            for request in ended:
                self.blocks.release(request)
        for item in batch.prefill:
            request = item.request
            self._prefilling.pop(request.id, None)
            sampled = item.samples
            request.computed += item.num_tokens
            if not sampled:
                continue
            request.generated += 1
            if request.generated >= request.stop_after or request.id in finished:
                self.blocks.release(request)
                ended.append(request)
            else:
                self.enter(request)
        return ended

    def cancel(self, request_id: str) -> Request | None:
        request = self._take_out(request_id)
        if request is not None:
            self.blocks.release(request)
        return request

    def _take_out(self, request_id: str) -> Request | None:
        for running in self._sets:
            if request_id in running:
                return running.leave(request_id)
        for queue in (self.waiting, self._ready):
            found = next((request for request in queue if request.id == request_id), None)
            if found is not None:
                queue.remove(found)
                return found
        return None


def take_blocks(blocks: BlockPool, request: Request, tokens: int) -> None:
    """Allocates what `request` lacks for `tokens` tokens."""
    missing = blocks_for(tokens, blocks.block_size) - request.num_blocks
    if missing > 0:
        blocks.allocate(request, missing)
