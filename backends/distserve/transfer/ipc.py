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


class LanePool:
    """Lanes that a source has shared before: memory and events of pairs that have ended, for those to come.

    torch keeps memory that was shared until the other process lets go, which a killed one never does. Here
    it is used again, once the last copy into it has ended. An old puller that still reads gets what belongs
    to a pull that has failed.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        """`size`: bytes of a lane."""
        self._device = device
        self._size = -(-size // ALIGNMENT) * ALIGNMENT
        self._lock = threading.Lock()
        self._idle: list[tuple[list[Tensor], list[Any]]] = []

    @property
    def size(self) -> int:
        return self._size

    @property
    def idle_bytes(self) -> int:
        with self._lock:
            return len(self._idle) * LANES * self._size

    def take(self) -> tuple[list[Tensor], list[Any]]:
        """Lanes and their events, of nobody else."""
        with self._lock:
            for place, (_, filled) in enumerate(self._idle):
                if all(event.query() for event in filled):  # a copy of a failed pull may still run
                    return self._idle.pop(place)
        cuda: Any = torch.cuda  # untyped in torch
        with cuda.device(self._device):
            lanes = [torch.zeros(self._size, dtype=torch.uint8, device=self._device) for _ in range(LANES)]
            filled = [cuda.Event(interprocess=True) for _ in range(LANES)]
            for event in filled:
                event.record()
        return lanes, filled

    def give(self, lanes: list[Tensor], filled: list[Any]) -> None:
        """They are free again."""
        with self._lock:
            self._idle.append((lanes, filled))


class IpcChannel:
    """A `Channel` in device memory that both ends reach; see `memory.MemoryChannel` for when a lane is used.

    `filled` and `drained`: one event per lane, recorded by the source and by the puller. `send`, `recv` and
    `wait` are to be called with the stream of the copies as the current one.
    """

    lanes = LANES

    def __init__(
        self,
        control: Control,
        lanes: list[Tensor],
        filled: list[Any],
        drained: list[Any],
        pool: LanePool | None,
        one_gpu: bool = True,
    ) -> None:
        """`pool`: to give the lanes back to, at the source; None at the puller. `one_gpu`: the puller's
        copies run on the GPU of the lanes, so that an event of that GPU can stand for them; between two, the
        host waits for each copy (`Copies.unpack`) and no event is needed.
        """
        self.memory: list[Tensor] | None = lanes
        self.device_bytes = 0 if pool is None else sum(lane.numel() for lane in lanes)
        self._control = control
        self._filled, self._drained = filled, drained
        self._pool = pool
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
        if self._pool is None:
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
        lanes, self.memory = self.memory, None
        if self._pool is not None and lanes is not None:
            self._pool.give(lanes, self._filled)


def offer(control: Control, pool: LanePool, device: torch.device, deadline: float) -> IpcChannel | None:
    """The source's end: shares lanes and events. None if the puller cannot use them."""
    cuda: Any = torch.cuda  # untyped in torch
    token = secrets.token_bytes(TOKEN_BYTES)
    message: Message = {"op": "ipc", "pid": os.getpid(), "bytes": pool.size, "token": token, "lanes": []}
    lanes, filled = pool.take()
    drained: list[Any] = []
    try:
        with cuda.device(device), contextlib.suppress(RuntimeError):
            for lane in lanes:
                lane[:TOKEN_BYTES] = torch.tensor(list(token), dtype=torch.uint8, device=device)
            cuda.current_stream(device).synchronize()  # the token is there before it is looked for
            storages: list[Any] = [lane.untyped_storage() for lane in lanes]
            message["uuid"] = str(cuda.get_device_properties(device).uuid)
            message["lanes"] = [
                {"memory": list(storage._share_cuda_()[1:]), "event": event.ipc_handle()}
                for storage, event in zip(storages, filled, strict=True)
            ]
        control.send(message, deadline)
        answer = control.recv(deadline)
        handles = answer.get("events")
        if answer.get("ok") is True and isinstance(handles, list) and len(handles) == LANES:
            with contextlib.suppress(RuntimeError, TypeError):
                drained = [cuda.Event.from_ipc_handle(device, handle) for handle in handles]
        control.send({"ok": len(drained) == LANES}, deadline)
    except BaseException:
        pool.give(lanes, filled)
        raise
    if len(drained) < LANES:
        pool.give(lanes, filled)
        return None
    return IpcChannel(control, lanes, filled, drained, pool)


def attach(control: Control, device: torch.device, lane_bytes: int, deadline: float) -> IpcChannel | None:
    """The puller's end: maps memory and events. None if that cannot be done."""
    message = control.recv(deadline)
    opened = _open(message, device, lane_bytes)
    if opened is None:
        control.send({"ok": False}, deadline)
        control.recv(deadline)
        return None
    lanes, filled, drained = opened
    one_gpu = lanes[0].device == device
    control.send({"ok": True, "events": [event.ipc_handle() for event in drained]}, deadline)
    if control.recv(deadline).get("ok") is not True:
        return None
    return IpcChannel(control, lanes, filled, drained, None, one_gpu)


def _open(
    message: Message, device: torch.device, lane_bytes: int
) -> tuple[list[Tensor], list[Any], list[Any]] | None:
    """Lanes, the source's events and own ones; None if the GPU or its memory cannot be reached."""
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
    except (RuntimeError, TypeError, KeyError):
        return None
    return lanes, filled, drained


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
