"""The running decode batch, with arithmetic that can skip steps.

All requests of the set advance together, so their counters follow from the step they joined at. What
changes the set is known ahead: the next finish (a heap) and the step at which blocks run out (requests
bucketed by the step, modulo the block size, at which they need their next block). The engine advances
by one step, the simulator by as many as nothing changes for, at the same cost.

A step is `begin` (takes the blocks that it writes to), the computation, `advance`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from distserve.core.blocks import BlockPool, blocks_for
from distserve.core.request import Request

NEVER = 1 << 60


class DecodeSet:
    """Requests that decode. Each has KV of all its known tokens but the last one."""

    def __init__(self, blocks: BlockPool) -> None:
        self.step = 0
        self.context = 0  # tokens in the cache, summed over the set
        self.blocks = blocks
        self._size = blocks.block_size
        self._running: dict[str, Request] = {}
        self._growing: list[dict[str, Request]] = [{} for _ in range(self._size)]
        self._finish: list[tuple[int, int, Request]] = []
        self._joins = 0
        self.begun = False  # a step is in progress

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running

    def join(self, request: Request) -> None:
        """Adds a request that owns exactly the blocks of its `computed` tokens. Not during a step."""
        if self.begun:
            raise RuntimeError(f"request {request.id} joins in the middle of a step")
        request.joined_step = self.step
        request.finish_step = self.step + request.stop_after - request.generated
        self._running[request.id] = request
        self._bucket(request)[request.id] = request
        self._joins += 1
        heapq.heappush(self._finish, (request.finish_step, self._joins, request))
        self.context += request.computed

    def leave(self, request_id: str) -> Request:
        """Takes a request out, with its counters up to date."""
        request = self._running.pop(request_id)
        del self._bucket(request)[request_id]  # before sync: the bucket follows from the joining state
        self.sync(request)
        self.context -= request.computed
        return request

    def sync(self, request: Request) -> None:
        """Brings the counters of a running request up to the current step."""
        steps = self.step - request.joined_step
        if steps:
            request.generated += steps
            request.computed += steps
            request.joined_step = self.step
        request.num_blocks = blocks_for(request.computed + self.begun, self._size)

    def synced(self) -> Iterator[Request]:
        """All running requests in the order they joined, up to date."""
        for request in self._running.values():
            self.sync(request)
            yield request

    def get(self, request_id: str) -> Request | None:
        request = self._running.get(request_id)
        if request is not None:
            self.sync(request)
        return request

    def last(self) -> Request:
        """The request that joined last: the one to preempt first."""
        return next(reversed(self._running.values()))

    def growth(self) -> int:
        """Blocks that the next step needs."""
        return len(self._growing[self.step % self._size])

    def begin(self) -> None:
        """Takes the blocks of the next step; `growth()` of them must be free. Twice is once."""
        if not self.begun:
            self._grow(self.step)
            self.begun = True

    def horizon(self) -> int:
        """After `begin`: steps for which the set stays as it is, until the next finish or lack of blocks."""
        return horizon((self,))

    def until_finish(self) -> int:
        """Steps to the next finish."""
        while self._finish and self._stale(self._finish[0]):
            heapq.heappop(self._finish)
        return self._finish[0][0] - self.step if self._finish else NEVER

    def advance(self, steps: int = 1) -> list[Request]:
        """Ends the step begun and runs `steps` - 1 more; `steps` <= `horizon()`.

        Returns the requests that reached their end; they are still in the set.
        """
        cycles, rest = divmod(steps - 1, self._size)
        if cycles:
            self.blocks.grow(self._running.values(), cycles)
        for step in range(self.step + 1, self.step + 1 + rest):
            self._grow(step)
        self.begun = False
        self.step += steps
        self.context += steps * len(self._running)
        done = []
        while self._finish and self._finish[0][0] <= self.step:
            entry = heapq.heappop(self._finish)
            # a preempted request that came back may finish at the step that its first entry says
            if not self._stale(entry) and entry[2] not in done:
                done.append(entry[2])
        return done

    def _grow(self, step: int) -> None:
        bucket = self._growing[step % self._size]
        if bucket:
            self.blocks.grow(bucket.values(), 1)

    def _stale(self, entry: tuple[int, int, Request]) -> bool:
        finish, _, request = entry
        return self._running.get(request.id) is not request or request.finish_step != finish

    def growth_at(self, steps: int) -> int:
        """Blocks that the step takes which begins after so many more."""
        return len(self._growing[(self.step + steps) % self._size])

    def _bucket(self, request: Request) -> dict[str, Request]:
        # at step s it computes token (computed + s - joined_step); a multiple of the block size needs a block
        return self._growing[(request.joined_step - request.computed) % self._size]


def horizon(sets: Sequence[DecodeSet]) -> int:
    """After `begin` of all: steps of each for which all stay as they are. They share one pool of blocks."""
    steps, count = NEVER, 0
    for one in sets:
        steps = min(steps, one.until_finish())
        count += len(one)
    if steps == NEVER:
        return NEVER
    blocks = sets[0].blocks
    if blocks.free >= count * blocks_for(steps, blocks.block_size):
        return steps
    cycles, free = divmod(blocks.free, count)
    full = cycles * blocks.block_size
    for offset in range(1, blocks.block_size + 1):
        free -= sum(one.growth_at(offset) for one in sets)
        if free < 0:
            break
        full += 1
    return min(steps, 1 + full)
