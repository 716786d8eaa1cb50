"""The decode side: fetches the KV of a handle from all source ranks that hold a part of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from distserve.core.shapes import Shape
from distserve.transfer.copies import mark
from distserve.transfer.errors import TransferError
from distserve.transfer.handle import Handle, Layout
from distserve.transfer.leases import Claimant
from distserve.transfer.memory import host_id
from distserve.transfer.packing import Packer, Pages
from distserve.transfer.plan import Slice, contacts
from distserve.transfer.pull import Pull, TransferStats
from distserve.transfer.receiver import PairKey, Receiver, ReceiverConfig
from distserve.transfer.source import first_layer_and_head, require_backend, staging_units
from distserve_kernels.transit import upload

__all__ = ["KVPuller", "TransferStats"]

IDLE_S = 60.0


class KVPuller:
    """Pulls for one decode rank. One thread per source rank it has met, so pairs do not wait for one another.

    Arguments as for `KVSource`, with this instance's shape, rank, layout, name and epoch. A pair that was not
    used for `idle_s` is closed.
    """

    def __init__(
        self,
        cache: Pages,
        shape: Shape,
        rank: int,
        layout: Layout,
        instance: str,
        epoch: int,
        *,
        secret: bytes | None = None,
        backend: str = "gloo",
        shared_memory: bool = True,
        staging_bytes: int | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        packer = Packer(cache, *first_layer_and_head(layout, shape, rank))
        self._layout = layout
        self._shape = shape
        self._rank = rank
        self._num_blocks = cache.num_blocks
        self._device = packer.device
        units = staging_units(packer, layout, staging_bytes)
        claimant = Claimant(instance, epoch, shape)
        require_backend(backend, packer)
        host = host_id(packer.device) if shared_memory else ""
        self._config = ReceiverConfig(packer, layout, claimant, rank, secret, backend, host, units, idle_s)
        self._calls: dict[Shape, dict[int, list[Slice]]] = {}
        self._lock = threading.Lock()
        self._receivers: dict[PairKey, Receiver] = {}
        self._pulls: dict[Future[TransferStats], Pull] = {}
        self._closing = False

    def pull(self, handle: Handle, dst_blocks: Sequence[int], deadline: float) -> Future[TransferStats]:
        """Starts copying the handle's KV into `dst_blocks`; `deadline` on `time.monotonic`.

        The future ends only when nothing writes to `dst_blocks` any more, with success or with a
        `TransferError` (source rank gone, refused, deadline, cancelled). Raises `TransferError` at once for a
        handle whose layout does not fit and `ValueError` for blocks that do not.
        """
        mismatch = self._layout.mismatch(handle.layout)
        if mismatch is not None:
            raise TransferError("FAILED_PRECONDITION", "layout_mismatch", f"handle.layout.{mismatch}")
        if len(dst_blocks) != handle.num_blocks:
            raise ValueError(f"dst_blocks: {len(dst_blocks)} given, the handle has {handle.num_blocks}")
        if dst_blocks and (min(dst_blocks) < 0 or max(dst_blocks) >= self._num_blocks):
            raise ValueError(f"dst_blocks: ids must be in [0, {self._num_blocks})")
        blocks = upload(np.array(dst_blocks, dtype=np.int64), self._device)
        calls = self._contacts(handle.layout.shape)
        pull = Pull(handle, blocks, mark(self._device), deadline, len(calls))
        pull.future.add_done_callback(self._forget)
        with self._lock:
            if self._closing:
                raise TransferError("CANCELLED", "closed", "the puller is closed")
            if not calls:  # all that this rank holds is taken elsewhere: cannot be, every rank holds a layer
                raise ValueError(f"rank={self._rank}: nothing to pull")
            self._pulls[pull.future] = pull
            for src_rank, slices in calls.items():
                self._receiver(handle, src_rank).add(pull, slices)
        return pull.future

    def cancel(self, future: Future[TransferStats]) -> None:
        """Ends a pull early: after the messages that are on their way, its future fails with CANCELLED."""
        with self._lock:
            pull = self._pulls.get(future)
        if pull is not None:
            pull.abandon(TransferError("CANCELLED", "cancelled", "the pull was cancelled"))

    @property
    def pending(self) -> int:
        """Pulls whose future has not ended."""
        with self._lock:
            return len(self._pulls)

    @property
    def pairs(self) -> int:
        """Source ranks that a thread is kept for."""
        with self._lock:
            return len(self._receivers)

    def close(self, timeout_s: float = 2.0) -> None:
        """Cancels all pulls and ends all pairs. Waits up to `timeout_s` for the threads."""
        with self._lock:
            self._closing = True
            receivers, pulls = list(self._receivers.values()), list(self._pulls.values())
        for pull in pulls:
            pull.abandon(TransferError("CANCELLED", "closed", "the puller is closed"))
        for receiver in receivers:
            receiver.stop(interrupt=True)
        until = time.monotonic() + timeout_s
        for receiver in receivers:
            receiver.join(max(0.0, until - time.monotonic()))

    def _contacts(self, src: Shape) -> dict[int, list[Slice]]:
        """The source ranks that this rank calls; kept, as there are few shapes and many pulls."""
        calls = self._calls.get(src)
        if calls is None:
            layout = self._layout
            by_rank = contacts(src, self._shape, layout.layers, layout.kv_heads)
            calls = self._calls[src] = by_rank[self._rank]
        return calls

    def _receiver(self, handle: Handle, src_rank: int) -> Receiver:
        """The pair with a source rank. Pairs with earlier starts of the same instance are ended."""
        key = PairKey(handle.instance, src_rank, handle.epoch, handle.addresses[src_rank])
        receiver = self._receivers.get(key)
        if receiver is not None:
            return receiver
        for old in [k for k in self._receivers if k[:2] == key[:2] and k.epoch < key.epoch]:
            self._receivers.pop(old).stop(interrupt=False)
        receiver = self._receivers[key] = Receiver(self._config, key, self._retire)
        return receiver

    def _retire(self, receiver: Receiver) -> bool:
        """An idle pair asks to end; refused if work has come meanwhile."""
        with self._lock:
            if not receiver.idle:
                return False
            if self._receivers.get(receiver.key) is receiver:
                del self._receivers[receiver.key]
            return True

    def _forget(self, future: Future[TransferStats]) -> None:
        with self._lock:
            self._pulls.pop(future, None)
