"""Scheduling of a prefill instance (paper, section 4.3): FCFS, batches of about Lm tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from distserve.core.batch import Batch, Item
from distserve.core.blocks import BlockPool, blocks_for
from distserve.core.request import Request
from distserve.core.scheduler import Limits, take_blocks


class PrefillScheduler:
    """Prompts are batched up to `max_batch_tokens` in total, longer ones run alone.

    A computed prompt keeps its blocks until `release`: prefill memory is the queue in front of decode,
    and new prompts wait when it is full (back-pressure).
    """

    def __init__(self, limits: Limits, blocks: BlockPool) -> None:
        self.limits = limits
        self.blocks = blocks
        self.waiting: deque[Request] = deque()
        self.waiting_tokens = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.waiting_tokens += request.known

    def credits(self) -> int:
        """Tokens of work this instance can take and start within its next two batches."""
        room = min(2 * self.limits.max_batch_tokens, self.blocks.free * self.blocks.block_size)
        return max(0, room - self.waiting_tokens)

    def schedule(self) -> Batch | None:
        budget = self.limits.max_batch_tokens
        items: list[Item] = []
        while self.waiting:
            request = self.waiting[0]
            tokens = request.known
            if (items and tokens > budget) or blocks_for(tokens, self.blocks.block_size) > self.blocks.free:
                break
            self.waiting.popleft()
            self.waiting_tokens -= tokens
            take_blocks(self.blocks, request, tokens)
            items.append(Item(request, 0, tokens))
            budget -= tokens
        return Batch(prefill=items) if items else None

    def complete(self, batch: Batch, finished: Collection[str] = (), steps: int = 1) -> list[Request]:
        """Returns the requests that ended with this token: no transfer will happen and they hold no blocks.

        The others of the batch keep their blocks; the caller hands them out and calls `release` in the end.
        """
        ended = []
        for item in batch.prefill:
            request = item.request
            request.computed += item.num_tokens
            request.generated += 1
            if request.generated >= request.stop_after or request.id in finished:
                self.release(request)
                ended.append(request)
        return ended

    def release(self, request: Request) -> None:
        """The request lets go of its blocks; a running transfer may still hold them."""
        self.blocks.release(request)

    def cancel(self, request_id: str) -> Request | None:
        """Takes a waiting request out. Handed-out ones are ended by `release`."""
        for request in self.waiting:
            if request.id == request_id:
                self.waiting.remove(request)
                self.waiting_tokens -= request.known
                return request
        return None

    def preempted(self) -> list[Request]:
        return []
