"""The prefill side: gives the blocks of leased prompts to the decode ranks that call."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from dataclasses import dataclass, replace

from distserve.core.shapes import Shape, head_range, layer_range
from distserve.transfer.control import require_secret
from distserve.transfer.handle import Layout, join_address
from distserve.transfer.ipc import LanePool
from distserve.transfer.leases import LeaseTable
from distserve.transfer.memory import host_id
from distserve.transfer.packing import Packer, Pages
from distserve.transfer.sender import Sender, SenderConfig

MOST_PAIRS = 1024
STAGING_BYTES = 4 << 20  # of one buffer; two per pair
GPU_STAGING_BYTES = 32 << 20  # a launch and a notice per message are to be small beside its copy


@dataclass(slots=True)
class SourceStats:
    """Since the start; bytes and seconds are of confirmed transfers."""

    confirmed: int = 0
    cancelled: int = 0  # by the puller
    failed: int = 0
    refused: int = 0
    bytes: int = 0
    seconds: float = 0.0
    pairs: int = 0  # open now
    device_bytes: int = 0  # GPU memory of these pairs: staging, mapped memory, communicators


class KVSource:
    """Listens on `address` for the pullers of decode ranks; one thread per pair answers, packs and sends.

    `cache`: the rank's pages; `shape`, `rank`: of this instance; `layout`: how its KV lies; `epoch`: of this
    engine start. `host` other than loopback needs a `secret`; `advertise` is the name that handles carry
    (default `host`). `backend`: "gloo" or "nccl"; where both ends have `shared_memory`, two processes of
    one host use that instead, on GPUs by CUDA IPC (see `memory.shared_kind`). `staging_bytes` bounds one of
    a pair's two buffers, `timeout_s` one transfer.
    """

    def __init__(
        self,
        cache: Pages,
        leases: LeaseTable,
        shape: Shape,
        rank: int,
        layout: Layout,
        instance: str,
        epoch: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        secret: bytes | None = None,
        backend: str = "gloo",
        shared_memory: bool = True,
        staging_bytes: int | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        require_secret("host", host, secret)
        if advertise is None and host in ("", "0.0.0.0", "::"):
            raise ValueError(f"host={host!r}: listens everywhere, so `advertise` must say what to call it by")
        packer = Packer(cache, *first_layer_and_head(layout, shape, rank))
        units = staging_units(packer, layout, staging_bytes)
        require_backend(backend, packer)
        host_name = host_id(packer.device) if shared_memory else ""
        self._lanes: LanePool | None = None
        if packer.device.type == "cuda":
            self._lanes = LanePool(packer.device, units * packer.unit * packer.dtype.itemsize)
        place = (packer, leases, shape, rank, layout, instance, epoch)
        self._config = SenderConfig(*place, secret, backend, host_name, units, timeout_s, lanes=self._lanes)
        self._lock = threading.Lock()
        self._stats = SourceStats()
        self._senders: dict[Sender, threading.Thread] = {}
        self._closing = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self._listener.setblocking(False)
        self.address = join_address(advertise or host, self._listener.getsockname()[1])
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="kv-source", daemon=True)
        self._thread.start()

    def stats(self) -> SourceStats:
        with self._lock:
            taken = sum(sender.device_bytes for sender in self._senders)
            taken += 0 if self._lanes is None else self._lanes.idle_bytes
            return replace(self._stats, pairs=len(self._senders), device_bytes=taken)

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends the listener and all pairs; running transfers fail. Waits `timeout_s` for the threads."""
        with self._lock:
            self._closing = True
            senders = dict(self._senders)
        self._wake.close()
        for sender in senders:
            sender.interrupt()
        until = time.monotonic() + timeout_s
        for thread in (self._thread, *senders.values()):
            thread.join(max(0.0, until - time.monotonic()))

    def _listen(self) -> None:
        with self._listener, self._woken, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                selector.select()  # `close` ends this wait
                if self._closing:
                    return
                with contextlib.suppress(OSError):  # the caller has gone again
                    self._welcome(self._listener.accept()[0])

    def _welcome(self, sock: socket.socket) -> None:
        with self._lock:
            if self._closing or len(self._senders) >= MOST_PAIRS:
                sock.close()
                return
            sender = Sender(self._config, sock, self._record)
            thread = threading.Thread(target=self._serve, args=(sender,), name="kv-sender", daemon=True)
            self._senders[sender] = thread
        thread.start()

    def _serve(self, sender: Sender) -> None:
        try:
            sender.run()
        finally:
            with self._lock:
                del self._senders[sender]

    def _record(self, outcome: str, size: int, seconds: float) -> None:
        with self._lock:
            setattr(self._stats, outcome, getattr(self._stats, outcome) + 1)
            if outcome == "confirmed":
                self._stats.bytes += size
                self._stats.seconds += seconds


def first_layer_and_head(layout: Layout, shape: Shape, rank: int) -> tuple[int, int]:
    """What the first page and its first head on a rank stand for, in the whole model's numbers."""
    pp_rank, tp_rank = shape.coordinates(rank)
    return (
        layer_range(layout.layers, shape.pp, pp_rank).start,
        head_range(layout.kv_heads, shape.tp, tp_rank).start,
    )


def staging_units(packer: Packer, layout: Layout, staging_bytes: int | None) -> int:
    """Units (see `chunks`) in a staging buffer of `staging_bytes` (None: the device's default), but always
    room for one block of all heads.
    """
    if staging_bytes is None:
        staging_bytes = GPU_STAGING_BYTES if packer.device.type == "cuda" else STAGING_BYTES
    return max(staging_bytes // (packer.unit * packer.dtype.itemsize), layout.kv_heads)


def require_backend(backend: str, packer: Packer) -> None:
    """Raises `ValueError` for a back end that does not exist or cannot reach the pages."""
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend={backend!r}: allowed are 'gloo' and 'nccl'")
    if backend == "nccl" and packer.device.type != "cuda":
        raise ValueError(f"backend='nccl': the pages are on {packer.device}; allowed are CUDA devices")
