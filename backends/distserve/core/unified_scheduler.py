"""Scheduling of a colocated instance: both phases in one engine, the baselines of the paper."""

from __future__ import annotations

from collections.abc import Collection

from distserve.core.batch import Batch, Item
from distserve.core.blocks import BlockPool
from distserve.core.config import Policy
from distserve.core.request import Request
from distserve.core.scheduler import ContinuousBatching, Limits, take_blocks


class UnifiedScheduler(ContinuousBatching):
    """`prefill_first`: waiting prompts go before decode steps (vLLM's policy of the paper).

    `chunked_prefill`: every step carries all decode tokens and fills up to `chunk_tokens` with a piece of
    the waiting prompts (Sarathi, DeepSpeed-MII).
    """

    def __init__(
        self, limits: Limits, blocks: BlockPool, policy: Policy = "prefill_first", stages: int = 1
    ) -> None:
        super().__init__(limits, blocks, stages)
        self.policy = policy

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> Batch | None:
        if self.policy == "chunked_prefill":
            return self._chunked()
        items = self.prefill_batch(self.limits.max_batch_tokens)
        if not items:
            return self.decode_batch()
        self.begin_prefill(items)
        return Batch(prefill=items)

    def complete(self, batch: Batch, finished: Collection[str] = (), steps: int = 1) -> list[Request]:
        partial = [item.request for item in batch.prefill if not item.samples]
        ended = super().complete(batch, finished, steps)
        self.waiting.extendleft(partial)  # at most one: the last of the batch
        return ended

    def _chunked(self) -> Batch | None:
        batch = self.decode_batch() or Batch()
        budget = self.limits.chunk_tokens - batch.num_decodes
        while self.waiting and budget > 0:
            request = self.waiting[0]
            if not request.computed and not self.fits(request, len(self._prefilling) + len(batch.prefill)):
                break
            self.waiting.popleft()
            take_blocks(self.blocks, request, request.known)
            tokens = min(budget, request.known - request.computed)
            batch.prefill.append(Item(request, request.computed, tokens))
            budget -= tokens
        self.begin_prefill(batch.prefill)
        return batch if batch.prefill or batch.decode is not None else None
