"""Recording device work once and running it again and again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Work = Callable[[], None]


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Recorder:
    """Turns work over static buffers into something that runs it again.

    On a GPU a CUDA graph: one launch instead of hundreds. All graphs of a recorder share their memory, as
    they never run at the same time. On a CPU, where there is nothing to record, the work itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: Any = None
        if device.type == "cuda":
            cuda: Any = torch.cuda  # untyped in torch
            self._pool = cuda.graph_pool_handle()
            self._stream = cuda.Stream(device)

    def record(self, work: Work) -> Work:
        """Runs the work, which must read nothing back and allocate the same each time, and records it."""
        if self._stream is None:
            work()
            return work
        cuda: Any = torch.cuda
        current = cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with cuda.stream(self._stream):  # compiles kernels, and lets libraries allocate what they keep
            work()
        self._stream.synchronize()
        graph = cuda.CUDAGraph()
        # other threads may use the device meanwhile, as the transfer's do
        # nor may a collection unload a kernel's module, which would spoil the recording
        with (
            _no_collection(),
            cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            work()
        current.wait_stream(self._stream)
        replay: Work = graph.replay
        return replay
