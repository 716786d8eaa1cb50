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
from distserve.core.decode_set import DecodeSet
from distserve.core.request import Request


@dataclass(frozen=True)
class Limits:
    """What bounds a batch. Tokens, except `max_batch_size` (requests)."""

    max_batch_size: int = 64  # requests decoding at once
    max_batch_tokens: int = 512  # Lm: prompts are batched up to this total, longer ones run alone
    chunk_tokens: int = 256  # chunked prefill: tokens of a step, decode tokens included
    reserve_tokens: int | None = 0  # output room assured at admission; None: all of max_tokens

    @classmethod
    def of(cls, config: EngineConfig) -> Limits:
        return cls(config.max_batch_size, config.max_batch_tokens, config.chunk_tokens, config.reserve_tokens)


class Scheduler(Protocol):
    """Common to prefill, decode and unified instances."""

    blocks: BlockPool

    def add(self, request: Request) -> None:
        """Takes a request into the queue (FCFS)."""
        ...

    def schedule(self) -> Batch | None:
        """The next batch, with its blocks allocated, or None if nothing can run."""
        ...

    def complete(self, batch: Batch, finished: Collection[str] = (), steps: int = 1) -> list[Request]:
        """Books a computed batch (`steps` times, if it only decodes) and returns the requests that ended.

        `finished` are ids that ended early (end token). Ended requests are out of the scheduler.
        """
        ...

    def cancel(self, request_id: str) -> Request | None:
        """Takes a request out, whatever its state, not during a step. Its blocks are let go."""
        ...

    def preempted(self) -> list[Request]:
        """Requests preempted since the last call: their KV was dropped and will be computed again."""
        ...


class ContinuousBatching:
    """Waiting requests that still need a prefill here, and the running decode set.

    The base of unified scheduling; on a decode instance only preempted requests wait here.
    """

    def __init__(self, limits: Limits, blocks: BlockPool) -> None:
        self.limits = limits
        self.blocks = blocks
        self.waiting: deque[Request] = deque()
        self.running = DecodeSet(blocks)
        self._preempted: list[Request] = []

    @property
    def waiting_tokens(self) -> int:
        return sum(request.known - request.computed for request in self.waiting)

    def preempted(self) -> list[Request]:
        out, self._preempted = self._preempted, []
        return out

    def fits(self, request: Request, held: int = 0) -> bool:
        """Whether a request can be admitted now, leaving the running ones a block each to grow into.

        `held` is the number of admitted requests outside `running` (being prefilled, or on transfer).
        """
        active = len(self.running) + held
        if active >= self.limits.max_batch_size:
            return False
        room = request.max_tokens - request.generated
        if self.limits.reserve_tokens is not None:
            room = min(room, self.limits.reserve_tokens)
        need = blocks_for(request.known + room, self.blocks.block_size)
        headroom = active + 1 if active else 0
        return self.blocks.free - need >= headroom - request.num_blocks

    def preempt_for_growth(self) -> None:
        """Preempts the requests that joined last until the next decode step has its blocks."""
        while len(self.running) > 1 and self.running.growth() > self.blocks.free:
            victim = self.running.leave(self.running.last().id)
            self.drop_kv(victim)
            self.waiting.appendleft(victim)

    def drop_kv(self, request: Request) -> None:
        self.blocks.release(request)
        request.computed = 0
        request.preemptions += 1
        self._preempted.append(request)

    def decode_batch(self) -> Batch | None:
        self.preempt_for_growth()
        if not len(self.running) or self.running.growth() > self.blocks.free:
            return None
        self.running.begin()
        return Batch(decode=self.running)

    def prefill_batch(self, budget: int, held: int = 0) -> list[Item]:
        """Whole prompts, FCFS, up to `budget` tokens; a longer one runs alone."""
        items: list[Item] = []
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

    def complete(self, batch: Batch, finished: Collection[str] = (), steps: int = 1) -> list[Request]:
        ended = []
        if batch.decode is not None:
            ended = self.running.advance(steps)
            for request in ended:
                self.running.leave(request.id)
            ended += [self.running.leave(id) for id in finished if id in self.running]
            for request in ended:
                self.blocks.release(request)
        for item in batch.prefill:
            request = item.request
            sampled = item.samples
            request.computed += item.num_tokens
            if not sampled:
                continue
            request.generated += 1
            if request.generated >= request.stop_after or request.id in finished:
                self.blocks.release(request)
                ended.append(request)
            else:
                self.running.join(request)
        return ended

    def cancel(self, request_id: str) -> Request | None:
        if request_id in self.running:
            request = self.running.leave(request_id)
        else:
            found = next((r for r in self.waiting if r.id == request_id), None)
            if found is None:
                return None
            self.waiting.remove(found)
            request = found
        self.blocks.release(request)
        return request


def take_blocks(blocks: BlockPool, request: Request, tokens: int) -> None:
    """Allocates what `request` lacks for `tokens` tokens."""
    missing = blocks_for(tokens, blocks.block_size) - request.num_blocks
    if missing > 0:
        blocks.allocate(request, missing)
