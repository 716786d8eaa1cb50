"""Scheduling of a decode instance: admission before the KV is pulled, then continuous batching."""

from __future__ import annotations

from collections import deque

from distserve.core.batch import Batch
from distserve.core.blocks import BlockPool
from distserve.core.request import Request
from distserve.core.scheduler import ContinuousBatching, Limits, take_blocks


class DecodeScheduler(ContinuousBatching):
    """Requests pass `incoming` (KV at prefill), `pulling` (blocks reserved, KV on its way), `running`."""

    def __init__(self, limits: Limits, blocks: BlockPool, stages: int = 1) -> None:
        super().__init__(limits, blocks, stages)
        self.incoming: deque[Request] = deque()
        self.pulling: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """Takes a prefilled request: `generated` tokens are known, `computed` of them have KV at prefill."""
        self.incoming.append(request)

    def admit(self) -> list[Request]:
        """Reserves blocks, FCFS. The caller pulls the KV into `request.blocks` and calls `start`.

        Preempted requests go first: they were admitted once.
        """
        admitted: list[Request] = []
        held = len(self._prefilling)
        while self.incoming and not self.waiting and self.fits(self.incoming[0], held + len(self.pulling)):
            request = self.incoming.popleft()
            take_blocks(self.blocks, request, request.computed)
            self.pulling[request.id] = request
            admitted.append(request)
        return admitted

    def start(self, request: Request) -> None:
        """The KV has arrived: the request decodes from the next step of a micro-batch on."""
        del self.pulling[request.id]
        self.enter(request)

    def schedule(self) -> Batch | None:
        """A preempted request's KV is computed again before the next decode step."""
        items = self.prefill_batch(self.limits.max_batch_tokens, len(self.pulling))
        if not items:
            return self.decode_batch()
        self.begin_prefill(items)
        return Batch(prefill=items)

    def cancel(self, request_id: str) -> Request | None:
        request = self.pulling.pop(request_id, None)
        if request is None:
            request = next((r for r in self.incoming if r.id == request_id), None)
            if request is None:
                return super().cancel(request_id)
            self.incoming.remove(request)
        self.blocks.release(request)
        return request
