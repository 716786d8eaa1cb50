"""Scheduling of a prefill instance (paper, section 4.3): FCFS, batches of about Lm tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from distserve.core.batch import Batch, Item
from distserve.core.blocks import BlockPool, blocks_for
from distserve.core.order import Key, Ordering, insert
from distserve.core.request import Request
from distserve.core.scheduler import Limits, take_blocks


class PrefillScheduler:
    """Prompts are batched up to `max_batch_tokens` in total, longer ones run alone.

    With `prefill_chunk_tokens` a longer prompt is computed in pieces of so many tokens, one such prompt at a
    time, and batches of shorter prompts go between its pieces: a short one waits for a piece, not for all
    of it, and the long one gets every other batch at least. It owns all its blocks from its first piece on,
    so that it can always be completed.

    A computed prompt keeps its blocks until `release`: prefill memory is the queue in front of decode,
    and new prompts wait when it is full (back-pressure).
    """

    def __init__(self, limits: Limits, blocks: BlockPool, ordering: Ordering | None = None) -> None:
        self.limits = limits
        self.blocks = blocks
        self.waiting: deque[Request] = deque()
        self.waiting_tokens = 0  # of prompts and of the rest of the one that is computed in pieces
        self._ordering = ordering or Ordering()
        self._long_tokens = 0  # of those, what belongs to prompts that are computed in pieces
        self._partial: Request | None = None  # has its blocks and some of its pieces
        self._rest = 0  # tokens of it that are not computed, nor in flight
        self._piece_in_flight = False
        self._piece_next = False

    @property
    def queued(self) -> int:
        """Requests that wait, in part or as a whole."""
        return len(self.waiting) + (self._partial is not None)

    def add(self, request: Request) -> None:
        insert(self.waiting, request, self._key)
        self.waiting_tokens += request.known
        if self._in_pieces(request):
            self._long_tokens += request.known

    def credits(self) -> int:
        """Tokens of work this instance can take and start within its next two batches.

        Prompts that can be overtaken are in the way of others by a piece, and by their memory.
        """
        limits, free = self.limits, self.blocks.free * self.blocks.block_size
        if not self._long_tokens:
            return max(0, min(2 * limits.max_batch_tokens, free) - self.waiting_tokens)
        piece = min(self._rest, limits.prefill_chunk_tokens or 0, limits.max_batch_tokens)
        room = min(2 * limits.max_batch_tokens, free - (self._long_tokens - self._rest)) - piece
        return max(0, room - (self.waiting_tokens - self._long_tokens))

    def schedule(self) -> Batch | None:
        if self._partial is None:
            return self._prompts()
        can_go_on = not self._piece_in_flight
        batch = None
        if not (self._piece_next and can_go_on):
            batch = self._prompts()
        if batch is None and can_go_on:
            batch = self._piece(self._partial)
        return batch

    def _prompts(self) -> Batch | None:
        """Whole prompts in their order, or the first piece of the one whose turn it is."""
        waiting, budget, place = self.waiting, self.limits.max_batch_tokens, 0
        items: list[Item] = []
        while place < len(waiting):
            request = waiting[place]
            tokens = request.known
            long = self._in_pieces(request)
            if long and self._partial is not None:
                place += 1  # its turn comes when the other one is done
                continue
            lacks_blocks = blocks_for(tokens, self.blocks.block_size) > self.blocks.free
            if (items and (long or tokens > budget)) or lacks_blocks:
                break
            del waiting[place]
            take_blocks(self.blocks, request, tokens)
            if long:
                self._partial, self._rest = request, tokens
                return self._piece(request)
            self.waiting_tokens -= tokens
            items.append(Item(request, 0, tokens))
            budget -= tokens
        self._piece_next = self._piece_next or bool(items)
        return Batch(prefill=items) if items else None

    def _piece(self, request: Request) -> Batch:
        assert self.limits.prefill_chunk_tokens is not None
        tokens = min(self.limits.prefill_chunk_tokens, self._rest)
        self._rest -= tokens
        self.waiting_tokens -= tokens
        self._long_tokens -= tokens
        self._piece_in_flight, self._piece_next = True, False
        return Batch(prefill=[Item(request, request.computed, tokens)])

    def complete(self, batch: Batch, finished: Collection[str] = (), steps: int = 1) -> list[Request]:
        """Returns the requests that ended with this token: no transfer will happen and they hold no blocks.

        The others of the batch keep their blocks; the caller hands them out and calls `release` in the end.
        """
        ended = []
        for item in batch.prefill:
            request = item.request
            request.computed += item.num_tokens
            if request is self._partial:
                self._piece_in_flight = False
                if not item.samples:
                    continue
                self._partial = None
            request.generated += 1
            if request.generated >= request.stop_after or request.id in finished:
                self.release(request)
                ended.append(request)
        return ended

    def release(self, request: Request) -> None:
        """The request lets go of its blocks; a running transfer may still hold them."""
        self.blocks.release(request)

    def cancel(self, request_id: str) -> Request | None:
        """Takes a waiting request out, not during a piece of it. Handed-out ones are ended by `release`."""
        request = self._partial
        if request is not None and request.id == request_id:
            self._leave(request, self._rest)
            self._partial, self._rest = None, 0
            self.release(request)
            return request
        for request in self.waiting:
            if request.id == request_id:
                self.waiting.remove(request)
                self._leave(request, request.known)
                return request
        return None

    def preempted(self) -> list[Request]:
        return []

    def _leave(self, request: Request, tokens: int) -> None:
        self.waiting_tokens -= tokens
        if self._in_pieces(request):
            self._long_tokens -= tokens

    def _in_pieces(self, request: Request) -> bool:
        limits = self.limits
        return limits.prefill_chunk_tokens is not None and request.known > limits.max_batch_tokens

    def _key(self, request: Request) -> Key:
        return self._ordering.key(request.priority, request.known, request.arrival_s, request.due_s)
