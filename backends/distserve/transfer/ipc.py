"""The data path between two GPU processes of one host: device memory of the source, mapped by the puller.

The source packs into it and the puller unpacks straight from it, so between instances on one GPU the KV is
copied twice on the device and never leaves it; between two GPUs it crosses their link once. That a lane is
filled, or empty again, is a CUDA event that both processes hold. A stream waits for it only once the host has
seen that it has come: the event of a killed process never does, and a stream that waits for it never ends.
Nothing here touches CUDA at import.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distserve.transfer.control import Control, Message
from distserve.transfer.errors import bad_message
from distserve.transfer.waiting import wait_for_device

LANES = 2
TOKEN_BYTES = 16
NOTICE_S = 5.0  # as in `memory`
ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class Lanes:
    """Device memory of a source and its events. `shared`: how another process maps them, per lane; made once,
    as torch keeps an event for each time that memory is shared.
    """

    memory: list[Tensor]
    filled: list[Any]
    shared: list[dict[str, Any]]


class LanePool:
    """Lanes that a source has shared before: memory and events of pairs that have ended, for those to come.

    torch keeps memory that was shared until the other process lets go, which a killed one never does. Here
    it is used again, once the last copy into it has ended, and the pool lives as long as its process. An old
    puller that still reads gets what belongs to a pull that has failed.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        """`size`: bytes of a lane."""
        self._device = device
        self._size = -(-size // ALIGNMENT) * ALIGNMENT
        self._lock = threading.Lock()
        self._idle: list[Lanes] = []

    @property
    def size(self) -> int:
        return self._size

    @property
    def idle_bytes(self) -> int:
        with self._lock:
            return len(self._idle) * LANES * self._size

    def take(self) -> Lanes:
        """Lanes of nobody else. Raises `RuntimeError` if memory can't be shared."""
        with self._lock:
            for place, lanes in enumerate(self._idle):
                if all(event.query() for event in lanes.filled):  # a copy of a failed pull may still run
                    return self._idle.pop(place)
        cuda: Any = torch.cuda  # untyped in torch
        with cuda.device(self._device):
            memory = [torch.zeros(self._size, dtype=torch.uint8, device=self._device) for _ in range(LANES)]
            filled = [cuda.Event(interprocess=True) for _ in range(LANES)]
            for event in filled:
                event.record()
            shared = [
                {"memory": _shared(m), "event": e.ipc_handle()} for m, e in zip(memory, filled, strict=True)
            ]
        return Lanes(memory, filled, shared)

    def give(self, lanes: Lanes) -> None:
        """They are free again."""
        with self._lock:
            self._idle.append(lanes)


def _shared(lane: Tensor) -> list[Any]:
    """What `UntypedStorage._new_shared_cuda` of another process takes, but for the device. Its last argument
    would make that process's current stream wait for ours; the token is there before the message.
    """
    storage: Any = lane.untyped_storage()
    return [*storage._share_cuda_()[1:-1], False]


class IpcChannel:
    """A `Channel` in device memory that both ends reach; see `memory.MemoryChannel` for when a lane is used.

    `filled` and `drained`: one event per lane, recorded by the source and by the puller. `send`, `recv` and
    `wait` are to be called with the stream of the copies as the current one.
    """

    lanes = LANES

    def __init__(
        self,
        control: Control,
        memory: list[Tensor],
        filled: list[Any],
        drained: list[Any],
        own: tuple[LanePool, Lanes] | None = None,
        one_gpu: bool = True,
    ) -> None:
        """`own`: at the source, the lanes and where to give them back to. `one_gpu`: the puller's copies run
        on the GPU of the lanes, so that an event of that GPU can stand for them; between two, the host waits
        for each copy (`Copies.unpack`) and no event is needed.
        """
        self.memory: list[Tensor] | None = memory
        self.device_bytes = 0 if own is None else sum(lane.numel() for lane in memory)
        self._control = control
        self._filled, self._drained = filled, drained
        self._is_source, self._own = own is not None, own
        self._one_gpu = one_gpu
        self._busy = [False] * LANES

    def send(self, lane: int, message: Tensor) -> None:
        """The copy that fills the lane has been issued, on the current stream."""
        del message  # lies in `memory`, or will
        self._filled[lane].record()
        self._busy[lane] = True
        self._control.send({"op": "sent", "lane": lane}, time.monotonic() + NOTICE_S)

    def recv(self, lane: int, message: Tensor) -> None:
        """What was read from the lane has been read once the current stream comes here."""
        del message
        if self._one_gpu:
            self._drained[lane].record()
        self._busy[lane] = True

    def wait(self, lane: int, deadline: float) -> None:
        """Until the other side's copy has ended."""
        if not self._busy[lane]:
            return
        self._busy[lane] = False
        event = self._drained[lane]
        if not self._is_source:
            event = self._filled[lane]
            notice = self._control.recv(deadline)
            if notice.get("op") != "sent" or notice.get("lane") != lane:
                raise bad_message(
                    f"op={notice.get('op')!r} lane={notice.get('lane')!r}: expected is 'sent' lane {lane}"
                )
        wait_for_device(event.query, self._control, deadline)
        event.wait()  # what it has done is seen by what comes after it in the current stream

    def close(self) -> None:
        """May be called twice. At the puller the memory is unmapped with the last tensor."""
        self.memory = None
        own, self._own = self._own, None
        if own is not None:
            pool, lanes = own
            pool.give(lanes)


def offer(control: Control, pool: LanePool, device: torch.device, deadline: float) -> IpcChannel | None:
    """The source's end: shares lanes and events. None if the puller cannot use them."""
    cuda: Any = torch.cuda  # untyped in torch
    token = secrets.token_bytes(TOKEN_BYTES)
    message: Message = {"op": "ipc", "pid": os.getpid(), "bytes": pool.size, "token": token, "lanes": []}
    lanes: Lanes | None = None
    with contextlib.suppress(RuntimeError):
        lanes = pool.take()
    drained: list[Any] = []
    try:
        if lanes is not None:
            for lane in lanes.memory:
                lane[:TOKEN_BYTES] = torch.tensor(list(token), dtype=torch.uint8, device=device)
            cuda.current_stream(device).synchronize()  # the token is there before it is looked for
            message["uuid"] = str(cuda.get_device_properties(device).uuid)
            message["lanes"] = lanes.shared
        control.send(message, deadline)
        answer = control.recv(deadline)
        handles = answer.get("events")
        if answer.get("ok") is True and isinstance(handles, list) and len(handles) == LANES:
            with contextlib.suppress(RuntimeError, TypeError):
                drained = [cuda.Event.from_ipc_handle(device, handle) for handle in handles]
        control.send({"ok": len(drained) == LANES}, deadline)
    except BaseException:
        if lanes is not None:
            pool.give(lanes)
        raise
    if lanes is None:
        return None
    if len(drained) < LANES:
        pool.give(lanes)
        return None
    return IpcChannel(control, lanes.memory, lanes.filled, drained, (pool, lanes))


def attach(control: Control, device: torch.device, lane_bytes: int, deadline: float) -> IpcChannel | None:
    """The puller's end: maps memory and events. None if that cannot be done."""
    message = control.recv(deadline)
    opened = _open(message, device, lane_bytes)
    if opened is None:
        control.send({"ok": False}, deadline)
        control.recv(deadline)
        return None
    memory, filled, drained, handles = opened
    one_gpu = memory[0].device == device
    control.send({"ok": True, "events": handles}, deadline)
    if control.recv(deadline).get("ok") is not True:
        return None
    return IpcChannel(control, memory, filled, drained, one_gpu=one_gpu)


def _open(
    message: Message, device: torch.device, lane_bytes: int
) -> tuple[list[Tensor], list[Any], list[Any], list[bytes]] | None:
    """Lanes, the source's events, own ones and their handles; None if the GPU or its memory cannot be
    reached.
    """
    pid, size, token, shared = (message.get(name) for name in ("pid", "bytes", "token", "lanes"))
    if type(pid) is not int or type(size) is not int or not isinstance(token, bytes):
        raise bad_message("ipc: pid, bytes and token are needed")
    if not isinstance(shared, list) or len(shared) != LANES or size < lane_bytes:
        return None
    if pid == os.getpid():
        return None  # CUDA opens no handle in the process that made it
    cuda: Any = torch.cuda
    theirs = reachable(str(message.get("uuid")), device)
    if theirs is None:
        return None
    try:
        lanes = []
        for entry in shared:
            storage = torch.UntypedStorage._new_shared_cuda(theirs.index, *entry["memory"])
            lane = torch.empty(0, dtype=torch.uint8, device=theirs)
            lanes.append(lane.set_(storage, 0, (size,), (1,)))
        filled = [cuda.Event.from_ipc_handle(theirs, entry["event"]) for entry in shared]
        if not all(hmac.compare_digest(bytes(lane[:TOKEN_BYTES].tolist()), token) for lane in lanes):
            return None
        drained = []
        with cuda.device(theirs):
            for _ in range(LANES):
                event = cuda.Event(interprocess=True)
                event.record()
                drained.append(event)
        handles = [event.ipc_handle() for event in drained]
    except (RuntimeError, TypeError, KeyError):
        return None
    return lanes, filled, drained, handles


def reachable(uuid: str, device: torch.device) -> torch.device | None:
    """The GPU of that id as this process numbers it, if `device` can copy from it."""
    cuda: Any = torch.cuda
    for index in range(cuda.device_count()):
        if str(cuda.get_device_properties(index).uuid) != uuid:
            continue
        same = index == device.index
        return (
            torch.device("cuda", index) if same or cuda.can_device_access_peer(device.index, index) else None
        )
    return None
