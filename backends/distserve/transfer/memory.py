"""The data path between two processes of one host: messages are packed straight into memory that both have
mapped.

Two copies instead of the four that a connection through the kernel takes. The memory is anonymous (a memfd),
so nothing is left behind however a process ends; the peer reaches it through /proc, which asks for the same
user.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import mmap
import os
import secrets
import time
from pathlib import Path

import torch
from torch import Tensor

from distserve.transfer.control import Control
from distserve.transfer.errors import bad_message

LANES = 2
TOKEN_BYTES = 16
NOTICE_S = 5.0  # for a frame of a few bytes on a connection that is nearly empty
ALIGNMENT = 4096
GPU = " gpu "


def host_id(device: torch.device) -> str:
    """Equal in two processes that had better share memory: same boot, process ids and user. On GPUs followed
    by `GPU` and the device's id.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
        name = f"{boot} {' '.join(spaces)} {os.getuid()}"
    except OSError:
        return f"unknown {secrets.token_hex(16)}"  # equal to nobody's
    if device.type == "cuda":
        name += f"{GPU}{torch.cuda.get_device_properties(device).uuid}"
    return name


def shared_kind(mine: str, theirs: str, backend: str) -> str:
    """The channel between two processes by their `host_id` (empty: memory is not to be shared).

    "memory" or "ipc" on one host, else `backend`.
    """
    (my_host, _, my_gpu), (host, _, gpu) = mine.partition(GPU), theirs.partition(GPU)
    if not mine or my_host != host or bool(my_gpu) != bool(gpu):
        return backend
    return "ipc" if gpu else "memory"


def without_ipc(mine: str, theirs: str, backend: str) -> str:
    """What serves two processes with GPUs where CUDA lets none map the other's memory: through the host if
    they share the GPU, on which NCCL takes no two ranks.
    """
    return "memory" if mine == theirs else backend


class MemoryChannel:
    """A `Channel` in shared memory; that a message is there is said over the control connection.

    The source fills a lane again only when the puller, which has unpacked what was in it, has said "ready",
    as for every kind of channel; so a buffer is never overwritten before it was read.
    """

    lanes = LANES
    device_bytes = 0

    def __init__(self, control: Control, memory: mmap.mmap, is_source: bool) -> None:
        self._control = control
        self._is_source = is_source
        self._waiting = [False] * LANES
        size = (len(memory) - ALIGNMENT) // LANES
        self.memory: list[Tensor] | None = [
            torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=ALIGNMENT + lane * size)
            for lane in range(LANES)
        ]

    def send(self, lane: int, message: Tensor) -> None:
        del message  # lies in `memory` already
        self._control.send({"op": "sent", "lane": lane}, time.monotonic() + NOTICE_S)

    def recv(self, lane: int, message: Tensor) -> None:
        del message
        self._waiting[lane] = True

    def wait(self, lane: int, deadline: float) -> None:
        if self._is_source or not self._waiting[lane]:
            return
        self._waiting[lane] = False
        notice = self._control.recv(deadline)
        if notice.get("op") != "sent" or notice.get("lane") != lane:
            raise bad_message(
                f"op={notice.get('op')!r} lane={notice.get('lane')!r}: expected is 'sent' lane {lane}"
            )

    def close(self) -> None:
        self.memory = None  # unmapped with the last tensor


def offer(control: Control, lane_bytes: int, deadline: float) -> MemoryChannel | None:
    """The source's end: makes the memory. None if that cannot be done, or the puller cannot map it."""
    token = secrets.token_bytes(TOKEN_BYTES)
    size = ALIGNMENT + LANES * -(-lane_bytes // ALIGNMENT) * ALIGNMENT
    memory, fd = None, -1
    try:
        with contextlib.suppress(OSError):
            fd = os.memfd_create("kv-pair", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            memory = mmap.mmap(fd, size)
            memory[:TOKEN_BYTES] = token
        control.send({"op": "memory", "pid": os.getpid(), "fd": fd, "bytes": size, "token": token}, deadline)
        answer = control.recv(deadline)
    finally:
        if fd >= 0:
            os.close(fd)
    if memory is None or answer.get("ok") is not True:
        return None
    return MemoryChannel(control, memory, is_source=True)


def attach(control: Control, lane_bytes: int, deadline: float) -> MemoryChannel | None:
    """The puller's end: maps the memory. None if that cannot be done."""
    message = control.recv(deadline)
    pid, fd, size, token = (message.get(name) for name in ("pid", "fd", "bytes", "token"))
    if type(pid) is not int or type(fd) is not int or type(size) is not int or not isinstance(token, bytes):
        raise bad_message("memory: pid, fd, bytes and token are needed")
    memory = None
    with contextlib.suppress(OSError, ValueError):
        memory = _map(pid, fd, size)
    good = (
        memory is not None
        and size >= ALIGNMENT + LANES * lane_bytes
        and hmac.compare_digest(memory[:TOKEN_BYTES], token)
    )
    control.send({"ok": good}, deadline)
    return MemoryChannel(control, memory, is_source=False) if good and memory is not None else None


def _map(pid: int, fd: int, size: int) -> mmap.mmap:
    """Raises `OSError` or `ValueError` if it is not a memory of this size that stays this large."""
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("the memory could shrink")
        return mmap.mmap(opened, size)
    finally:
        os.close(opened)
