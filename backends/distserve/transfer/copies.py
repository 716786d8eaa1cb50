"""Copies between pages and staging buffers, on the pages' device: at once on a CPU, on an own stream on a
GPU.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from distserve.transfer.channel import Channel
from distserve.transfer.chunks import Piece, units
from distserve.transfer.errors import TransferError, timed_out
from distserve.transfer.packing import Packer

logger = logging.getLogger(__name__)

PAUSE_S = 50e-6  # between two looks at a CUDA event
SETTLE_S = 1.0  # for copies that were issued before a transfer failed
STUCK_S = 120.0  # longer than any step: a device that has not ended a copy by then does nothing more


class Copies:
    """One staging buffer per lane of a channel, and the packing in and out of them.

    Messages lie in the channel's own memory if it has some, else in pinned host memory for Gloo with pages on
    a GPU, else in the packed buffers themselves. `limit` is the size of a buffer in units (see `chunks`):
    staging memory is `lanes * limit` units and stays that (`device_bytes` of it on a GPU, the channel's own
    not counted).
    """

    def __init__(self, packer: Packer, channel: Channel, limit: int, kind: str) -> None:
        self._packer = packer
        size, dtype, device = limit * packer.unit, packer.dtype, packer.device
        cuda: Any = torch.cuda  # untyped in torch
        # torch deals out streams in turns; NCCL's groups take theirs from those of the other priority
        self._stream: Any = cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.device_bytes = 0
        wire: list[Tensor] | None = None
        if channel.memory is not None:
            wire = [memory[: size * dtype.itemsize].view(dtype) for memory in channel.memory]
        elif device.type == "cuda" and kind == "gloo":
            wire = [torch.empty(size, dtype=dtype, pin_memory=True) for _ in range(channel.lanes)]
        if wire is not None and wire[0].device == device:
            self._buffers = self._wire = wire
            return
        self._buffers = self._staging(channel.lanes, size)
        if device.type == "cuda":
            self.device_bytes = channel.lanes * size * dtype.itemsize
        self._wire = self._buffers if wire is None else wire

    def _staging(self, count: int, size: int) -> list[Tensor]:
        """Of the memory that all streams share, where a pair that is made again finds the last one's."""
        dtype, device, own = self._packer.dtype, self._packer.device, self._stream
        if own is None:
            return [torch.empty(size, dtype=dtype, device=device) for _ in range(count)]
        cuda: Any = torch.cuda  # untyped in torch
        shared = cuda.default_stream(device)
        with cuda.stream(shared):
            buffers = [torch.empty(size, dtype=dtype, device=device) for _ in range(count)]
        own.wait_stream(shared)  # what had that memory before may still run there
        for buffer in buffers:
            buffer.record_stream(own)  # not given to others while a copy runs
        return buffers

    def current(self) -> AbstractContextManager[Any]:
        """Work issued inside belongs to the own stream; the channel's operations are ordered with it."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def after(self, event: Any, blocks: Tensor) -> None:
        """Copies from here on come after what `event` (of `mark`) stands for. They read `blocks`: that memory
        is not given to others before they have, however late they run.
        """
        if event is not None:
            self._stream.wait_event(event)
            blocks.record_stream(self._stream)

    def pack(self, lane: int, message: Sequence[Piece], blocks: Tensor, deadline: float) -> Tensor:
        """Gathers a message's blocks; returns what is to be sent."""
        filled = self._packer.pack(message, blocks, self._buffers[lane])
        if self._wire is self._buffers:
            return filled
        out = self._wire[lane][: filled.numel()]
        out.copy_(filled, non_blocking=True)
        self.finish(deadline)
        return out

    def target(self, lane: int, message: Sequence[Piece]) -> Tensor:
        """Where a message is to be received."""
        return self._wire[lane][: units(message) * self._packer.unit]

    def unpack(self, lane: int, message: Sequence[Piece], blocks: Tensor, deadline: float) -> None:
        """Scatters a received message into the request's blocks."""
        buffer = self._buffers[lane]
        if self._wire is not self._buffers:
            wire = self.target(lane, message)
            buffer[: wire.numel()].copy_(wire, non_blocking=True)
        self._packer.unpack(message, blocks, buffer)
        if self._wire is not self._buffers:
            self.finish(deadline)  # the next message overwrites what was on the wire

    def finish(self, deadline: float) -> None:
        """Until all copies issued so far have ended. Raises `TransferError` at the deadline."""
        if self._stream is None:
            return
        event = self._stream.record_event()
        while not event.query():
            if time.monotonic() >= deadline:
                raise timed_out("copy on the device")
            time.sleep(PAUSE_S)

    def settle(self) -> None:
        """Until nothing that was issued writes to pages any more.

        A copy can't be called back, and before it has ended its pages can't be given to others, whatever has
        become of the request. Where it never ends, neither will what waits behind it: the process goes, and
        its supervisor starts it again.
        """
        try:
            self.finish(time.monotonic() + STUCK_S)
        except TransferError:
            logger.critical("ends: the device has not ended a copy after %g s", STUCK_S)
            os._exit(1)


def work_apart(device: torch.device) -> None:
    """The calling thread does nothing in a stream of others from here on, and nothing on another GPU.

    What torch does in passing it does in the current stream, and waits for that one when it unmaps memory of
    another process: in a thread that has said nothing the engine's, and on the first GPU.
    """
    if device.type == "cuda":
        cuda: Any = torch.cuda  # untyped in torch
        cuda.set_device(device)
        cuda.set_stream(cuda.Stream(device, priority=-1))


def mark(device: torch.device) -> Any:
    """A point in the caller's current stream, for `Copies.after`; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_stream(device).record_event()
