"""A prefill instance that also serves some requests to their end, while no decode instance is there."""

from __future__ import annotations

from collections.abc import Collection

from distserve.core.batch import Batch
from distserve.core.prefill_scheduler import PrefillScheduler
from distserve.core.request import Request
from distserve.core.scheduler import Scheduler
from distserve.core.unified_scheduler import UnifiedScheduler


class StandbyScheduler:
    """A prefill queue and a colocated one on the same blocks; where both have work they take turns."""

    def __init__(self, prefill: PrefillScheduler, stages: int = 1) -> None:
        self.blocks = prefill.blocks
        self.prefill = prefill
        self.whole = UnifiedScheduler(prefill.limits, prefill.blocks, stages=stages)
        self._whole_ids: set[str] = set()
        self._whole_next = False

    @property
    def waiting_tokens(self) -> int:
        return self.prefill.waiting_tokens + self.whole.waiting_tokens

    def add(self, request: Request) -> None:
        """A request that is handed out after its first token."""
        self.prefill.add(request)

    def add_whole(self, request: Request) -> None:
        """A request that stays here to its end."""
        self._whole_ids.add(request.id)
        self.whole.add(request)

    def credits(self) -> int:
        """Tokens of work that can be taken and started within the next batches."""
        return max(0, self.prefill.credits() - self.whole.waiting_tokens)

    def schedule(self) -> Batch | None:
        order: tuple[Scheduler, Scheduler] = (self.prefill, self.whole)
        for scheduler in reversed(order) if self._whole_next else order:
            batch = scheduler.schedule()
            if batch is not None:
                self._whole_next = scheduler is self.prefill
                return batch
        return None

    def complete(self, batch: Batch, finished: Collection[str] = (), steps: int = 1) -> list[Request]:
        if batch.decode is None and batch.prefill[0].request.id not in self._whole_ids:
            return self.prefill.complete(batch, finished, steps)
        ended = self.whole.complete(batch, finished, steps)
        self._whole_ids.difference_update(request.id for request in ended)
        return ended

    def cancel(self, request_id: str) -> Request | None:
        if request_id not in self._whole_ids:
            return self.prefill.cancel(request_id)
        request = self.whole.cancel(request_id)
        if request is not None:
            self._whole_ids.discard(request_id)
        return request

    def preempted(self) -> list[Request]:
        return self.whole.preempted()
