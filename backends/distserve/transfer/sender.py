"""The source's end of one pair: answers requests one after the other, packs and sends."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape
from distserve.transfer.channel import SOURCE, Channel, open_channel
from distserve.transfer.chunks import message_units, messages, total_units
from distserve.transfer.control import Control, Message, welcome
from distserve.transfer.copies import SETTLE_S, Copies, work_apart
from distserve.transfer.errors import TransferError, bad_message
from distserve.transfer.handle import Layout
from distserve.transfer.ipc import LanePool
from distserve.transfer.leases import Claim, LeaseTable
from distserve.transfer.memory import shared_kind, without_ipc
from distserve.transfer.packing import Packer
from distserve.transfer.plan import Slice, callers, contacts
from distserve.transfer.request import Accepted, PullRequest, refusal_to_wire
from distserve_kernels.transit import upload

logger = logging.getLogger(__name__)

GREETING_S = 5.0
# on a CPU: what stays in a core's cache from packing to sending has 1.6 times the rate of 4 MiB
GLOO_MESSAGE_BYTES = 1 << 20
IDLE_S = 300.0  # longer than a puller keeps an idle pair, so that it is the puller that closes it


@dataclass(frozen=True, slots=True)
class SenderConfig:
    """What all pairs of one source share. `host`: as in `PullRequest`; `units`: size of a staging buffer."""

    packer: Packer
    leases: LeaseTable
    shape: Shape
    rank: int
    layout: Layout
    instance: str
    epoch: int
    secret: bytes | None
    backend: str
    host: str
    units: int
    timeout_s: float
    lanes: LanePool | None = None  # on a GPU: what is shared with pullers of this host


@dataclass(frozen=True, slots=True)
class Job:
    """One accepted request: `messages` messages of at most `units` units."""

    claim: Claim
    slices: Sequence[Slice]
    messages: int
    units: int
    bytes: int
    channel: str  # kind, should a new one be needed
    otherwise: str
    deadline: float


# (outcome: "confirmed", "failed", "cancelled" or "refused"; bytes; seconds)
Record = Callable[[str, int, float], None]


class Sender:
    """One control connection and, once something is sent, its pair group. `run` is the body of the pair's
    thread.
    """

    def __init__(self, config: SenderConfig, sock: socket.socket, record: Record) -> None:
        self._config = config
        self._record = record
        self._control = Control(sock)
        self._calls: tuple[Shape, dict[int, dict[int, list[Slice]]]] | None = None
        self._channel: Channel | None = None
        self._copies: Copies | None = None
        self.device_bytes = 0  # GPU memory that the pair takes at this end

    def run(self) -> None:
        """Until the peer goes, stays away too long or breaks the rules: then this pair alone is torn down."""
        work_apart(self._config.packer.device)
        try:
            welcome(self._control, self._config.secret, time.monotonic() + GREETING_S)
            while True:
                self._serve(self._control.recv(time.monotonic() + IDLE_S))
        except TransferError:
            pass  # counted where it happened; the peer learns it from the closed connection
        finally:
            self._control.close()
            if self._channel is not None:
                self._channel.close()

    def interrupt(self) -> None:
        """Makes the thread end. From any thread."""
        self._control.interrupt()

    def _serve(self, wire: Message) -> None:
        start = time.monotonic()
        try:
            if wire.get("op") != "pull":
                raise bad_message(f"op={wire.get('op')!r}: allowed is 'pull'")
            job = self._accept(PullRequest.from_wire(wire), start)
        except TransferError as error:
            self._record("refused", 0, 0.0)
            self._control.send(refusal_to_wire(error), start + self._config.timeout_s)
            return
        outcome = "failed"
        try:
            outcome = "confirmed" if self._transfer(job) else "cancelled"
        finally:  # whatever happened, this copy has ended
            if outcome == "confirmed":
                self._config.leases.confirm(job.claim)
            else:
                self._config.leases.fail(job.claim)
            self._record(outcome, job.bytes, time.monotonic() - start)

    def _accept(self, request: PullRequest, start: float) -> Job:
        """Checks everything that can be wrong with a request, then claims the lease."""
        config = self._config
        handle = request.handle
        if handle.instance != config.instance:
            raise _refused(
                "wrong_instance", f"handle.instance={handle.instance!r}: this is {config.instance!r}"
            )
        if handle.epoch != config.epoch:
            raise _refused("stale_epoch", f"handle.epoch={handle.epoch}: this start has {config.epoch}")
        mismatch = config.layout.mismatch(request.layout)
        if mismatch is not None:
            raise _refused("layout_mismatch", f"layout.{mismatch}")
        if request.backend != config.backend:
            raise _refused(
                "backend_mismatch", f"backend={request.backend!r}: this instance has {config.backend!r}"
            )
        if request.num_blocks != handle.num_blocks:
            raise _refused(
                "wrong_blocks", f"num_blocks={request.num_blocks}: the handle has {handle.num_blocks}"
            )
        kind = shared_kind(config.host, request.host, config.backend)
        try:
            calls = self._contacts(request.claimant.shape)
            slices = calls[request.rank].get(config.rank, [])
            most = self._units(kind, slices, request.units)
            count, units = message_units(slices, request.num_blocks, most)
        except (ConfigError, ValueError) as error:
            raise _refused("wrong_shape", str(error)) from None
        claim = config.leases.claim(handle, request.claimant, request.rank, callers(calls, config.rank))
        size = total_units(slices, request.num_blocks) * config.packer.unit * config.packer.dtype.itemsize
        otherwise = without_ipc(config.host, request.host, config.backend) if kind == "ipc" else ""
        deadline = start + min(config.timeout_s, request.timeout_s)
        return Job(claim, slices, count, units, size, kind, otherwise, deadline)

    def _units(self, kind: str, slices: Sequence[Slice], asked: int) -> int:
        """The largest message that suits both ends and the channel."""
        packer, limit = self._config.packer, min(self._config.units, asked)
        if kind != "gloo" or packer.device.type != "cpu":
            return limit
        widest = max((len(s.heads) for s in slices), default=0)
        return min(limit, max(widest, GLOO_MESSAGE_BYTES // (packer.unit * packer.dtype.itemsize)))

    def _contacts(self, shape: Shape) -> dict[int, dict[int, list[Slice]]]:
        """A puller's shape stays what it is, so the last answer is kept."""
        if self._calls is None or self._calls[0] != shape:
            layout = self._config.layout
            self._calls = shape, contacts(self._config.shape, shape, layout.layers, layout.kv_heads)
        return self._calls[1]

    def _transfer(self, job: Job) -> bool:
        """True once the puller has confirmed, False if it has cancelled. Raises `TransferError`."""
        kind = job.channel if job.messages > 0 and self._channel is None else ""
        otherwise = job.otherwise if kind else ""
        accepted = Accepted(job.messages, job.units, job.bytes, kind, otherwise)
        self._control.send(accepted.to_wire(), job.deadline)
        if kind:
            packer, units = self._config.packer, self._config.units
            size = units * packer.unit * packer.dtype.itemsize
            lanes = self._config.lanes
            place = (kind, SOURCE, packer.device, self._control, size, job.deadline, otherwise, lanes)
            self._channel, kind = open_channel(*place)
            self._copies = Copies(packer, self._channel, units, kind)
            self.device_bytes = self._channel.device_bytes + self._copies.device_bytes
            logger.info("pair over %s, %.1f MB of GPU memory", kind, self.device_bytes / 1e6)
        if self._channel is not None and self._copies is not None and job.messages:
            try:
                if not self._send(job, self._channel, self._copies):
                    return False
            finally:
                with contextlib.suppress(TransferError):
                    self._copies.finish(time.monotonic() + SETTLE_S)
        return self._ended(self._control.recv(job.deadline))

    def _send(self, job: Job, channel: Channel, copies: Copies) -> bool:
        with copies.current():
            blocks = upload(np.array(job.claim.blocks, dtype=np.int64), self._config.packer.device)
        # messages that the puller is ready for; so neither end waits inside a group for a peer that is busy
        allowed = channel.lanes
        for index, message in enumerate(messages(job.slices, len(blocks), job.units)):
            lane = index % channel.lanes
            while allowed <= index:
                reply = self._control.recv(job.deadline)
                if reply.get("op") == "cancel":
                    return False
                if reply.get("op") != "ready":
                    raise bad_message(f"op={reply.get('op')!r}: allowed are 'ready' and 'cancel'")
                allowed += 1
            with copies.current():
                channel.wait(lane, job.deadline)  # its buffer is free again
                channel.send(lane, copies.pack(lane, message, blocks, job.deadline))
        with copies.current():
            for lane in range(channel.lanes):
                channel.wait(lane, job.deadline)
        return True

    def _ended(self, reply: Message) -> bool:
        if reply.get("op") not in ("confirm", "cancel"):
            raise bad_message(f"op={reply.get('op')!r}: allowed are 'confirm' and 'cancel'")
        return bool(reply["op"] == "confirm")


def _refused(reason: str, message: str) -> TransferError:
    return TransferError("FAILED_PRECONDITION", reason, message)
