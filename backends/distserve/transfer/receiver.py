"""The puller's end of one pair: works through its pulls one after the other, receives and unpacks."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distserve.transfer.channel import PULLER, Channel, open_channel
from distserve.transfer.chunks import Piece, messages, total_units
from distserve.transfer.control import Control, Message, connect
from distserve.transfer.copies import Copies, work_apart
from distserve.transfer.errors import TransferError, bad_message, peer_gone, timed_out
from distserve.transfer.handle import Layout, split_address
from distserve.transfer.leases import Claimant
from distserve.transfer.packing import Packer
from distserve.transfer.plan import Slice
from distserve.transfer.pull import Pull
from distserve.transfer.request import LONGEST_TIMEOUT_S, Accepted, PullRequest, refusal_from_wire


class PairKey(NamedTuple):
    """A source rank of one start of an instance."""

    instance: str
    src_rank: int
    epoch: int
    address: str


@dataclass(frozen=True, slots=True)
class ReceiverConfig:
    """What all pairs of one puller share. `host`: as in `PullRequest`; `units`: size of a staging buffer."""

    packer: Packer
    layout: Layout
    claimant: Claimant
    rank: int
    secret: bytes | None
    backend: str
    host: str
    units: int
    idle_s: float


class Receiver:
    """A thread with a queue. It connects when there is work, and again after whatever failed before."""

    def __init__(self, config: ReceiverConfig, key: PairKey, retire: Callable[[Receiver], bool]) -> None:
        self.key = key
        self._config = config
        self._retire = retire
        self._work: queue.SimpleQueue[tuple[Pull, Sequence[Slice]] | None] = queue.SimpleQueue()
        self._control: Control | None = None
        self._channel: Channel | None = None
        self._copies: Copies | None = None
        self._interrupted = False
        self._thread = threading.Thread(target=self._run, name=f"kv-puller-{key.instance}", daemon=True)
        self._thread.start()

    def add(self, pull: Pull, slices: Sequence[Slice]) -> None:
        self._work.put((pull, slices))

    @property
    def idle(self) -> bool:
        return self._work.empty()

    def stop(self, interrupt: bool) -> None:
        """Ends the thread after the work it has; with `interrupt` a running transfer is broken off."""
        self._work.put(None)
        if interrupt:
            self._interrupted = True
            control = self._control
            if control is not None:
                control.interrupt()  # the source then drops its end, which wakes a wait inside the group

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        work_apart(self._config.packer.device)
        try:
            while True:
                try:
                    work = self._work.get(timeout=self._config.idle_s)
                except queue.Empty:
                    if self._retire(self):
                        return
                    continue
                if work is None:
                    return
                self._part(*work)
                del work
        finally:
            self._teardown()

    def _part(self, pull: Pull, slices: Sequence[Slice]) -> None:
        size = 0
        try:
            size = self._fetch(pull, slices)
        except TransferError as error:
            pull.abandon(error)
        except Exception as error:
            pull.abandon(TransferError("INTERNAL", "internal", f"{type(error).__name__}: {error}"))
            self._teardown()
        finally:
            pull.part_ended(size)

    def _fetch(self, pull: Pull, slices: Sequence[Slice]) -> int:
        """Bytes received. Raises `TransferError`; the pair is then torn down, except after a refusal or a
        cancel.
        """
        control, answer = self._ask(self._request(pull), pull)
        if answer.get("ok") is False:
            raise refusal_from_wire(answer)
        pull.accepted()
        try:
            accepted = self._checked(Accepted.from_wire(answer), slices, len(pull.blocks))
            if accepted.channel:
                self._open(control, accepted, pull.deadline)
            complete = self._receive(control, pull, slices, accepted)
            if control.gone():  # before that the source keeps its blocks and buffers for us, no longer
                raise peer_gone("the source has ended the transfer")
            control.send({"op": "confirm" if complete else "cancel"}, pull.deadline)
        except BaseException:
            self._teardown()
            raise
        if not complete:
            raise pull.error or timed_out("pull")
        return accepted.bytes

    def _request(self, pull: Pull) -> PullRequest:
        config, left = self._config, pull.deadline - time.monotonic()
        if pull.error is not None:
            raise pull.error
        if left <= 0:
            raise timed_out("waiting for the pair")
        return PullRequest(
            handle=pull.handle,
            layout=config.layout,
            claimant=config.claimant,
            rank=config.rank,
            num_blocks=len(pull.blocks),
            units=config.units,
            backend=config.backend,
            host=config.host,
            timeout_s=min(left, LONGEST_TIMEOUT_S),
        )

    def _ask(self, request: PullRequest, pull: Pull) -> tuple[Control, Message]:
        """Sends the request: on the connection from before, or on a new one where there is none or it has
        died.
        """
        reused = self._control is not None
        try:
            if self._control is None:
                host, port = split_address(self.key.address)
                self._control = connect(host, port, self._config.secret, pull.deadline)
            control = self._control
            control.send(request.to_wire(), pull.deadline)
            return control, control.recv(pull.deadline)
        except TransferError as error:
            self._teardown()
            if not reused or error.reason != "peer_gone" or self._interrupted:
                raise
        return self._ask(request, pull)

    def _checked(self, accepted: Accepted, slices: Sequence[Slice], num_blocks: int) -> Accepted:
        """Raises `TransferError` unless the source means to send exactly what this end will receive."""
        units, count = accepted.units, 0
        size = total_units(slices, num_blocks) * self._config.packer.unit * self._config.packer.dtype.itemsize
        if size:
            if not max(len(s.heads) for s in slices) <= units <= self._config.units:
                raise bad_message(f"units={units}: the staging buffer has {self._config.units}")
            count = sum(1 for _ in messages(slices, num_blocks, units))
        expected = Accepted(count, units, size, accepted.channel, accepted.otherwise)
        fresh = count > 0 and self._channel is None
        kinds = self._kinds if fresh else ("",)
        allowed = accepted.channel in kinds and accepted.otherwise in ("", *kinds)
        if not allowed or accepted != expected:
            raise bad_message(f"the source wants to send {accepted}; this end expects {expected}")
        return accepted

    @property
    def _kinds(self) -> tuple[str, ...]:
        return (self._config.backend, "memory", "ipc") if self._config.host else (self._config.backend,)

    def _open(self, control: Control, accepted: Accepted, deadline: float) -> None:
        packer, kind = self._config.packer, accepted.channel
        size = accepted.units * packer.unit * packer.dtype.itemsize
        place = (kind, PULLER, packer.device, control, size, deadline, accepted.otherwise)
        self._channel, kind = open_channel(*place)
        self._copies = Copies(packer, self._channel, self._config.units, kind)

    def _receive(self, control: Control, pull: Pull, slices: Sequence[Slice], accepted: Accepted) -> bool:
        """True once all is in place; False if the pull was abandoned, after what was on its way has come.

        The source may send the first message of each lane at once, every further one after a "ready" for it.
        """
        channel, copies = self._channel, self._copies
        if accepted.messages == 0 or channel is None or copies is None:
            return True
        copies.after(pull.event, pull.blocks)
        in_flight: deque[tuple[int, list[Piece]]] = deque()
        for index, message in enumerate(messages(slices, len(pull.blocks), accepted.units)):
            lane, further = index % channel.lanes, index >= channel.lanes
            if further:
                self._land(channel, copies, pull, *in_flight.popleft())
                if pull.error is not None:
                    break
            with copies.current():
                channel.recv(lane, copies.target(lane, message))
            if further:
                control.send({"op": "ready"}, pull.deadline)
            in_flight.append((lane, message))
        while in_flight:
            self._land(channel, copies, pull, *in_flight.popleft())
        copies.finish(pull.deadline)
        return pull.error is None

    def _land(self, channel: Channel, copies: Copies, pull: Pull, lane: int, message: list[Piece]) -> None:
        with copies.current():
            channel.wait(lane, pull.deadline)
            if pull.error is None:
                copies.unpack(lane, message, pull.blocks, pull.deadline)

    def _teardown(self) -> None:
        """Drops this pair. After it nothing writes to the pages any more."""
        if self._control is not None:
            self._control.close()
        if self._channel is not None:
            self._channel.close()
        if self._copies is not None:
            self._copies.settle()
        self._control = self._channel = self._copies = None
