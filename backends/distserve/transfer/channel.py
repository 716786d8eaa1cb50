"""The data path of a pair: a two-rank `torch.distributed` process group, outside the default group.

Gloo on CPUs and NCCL on GPUs share this code. The groups are made over the authenticated control connection
and then checked with a token, so that a stranger who got in first is noticed. A group that failed is dropped
with everything that refers to it; nothing of it is used again.
"""

from __future__ import annotations

import hmac
import secrets
import time
from abc import abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from distserve.transfer.control import Control
from distserve.transfer.errors import TransferError, bad_message, peer_gone, timed_out
from distserve.transfer.memory import attach, offer
from distserve.transfer.rendezvous import ControlStore

if TYPE_CHECKING:
    from distserve.transfer.ipc import LanePool

SOURCE, PULLER = 0, 1  # ranks within a pair
TOKEN_BYTES = 16


class Channel(Protocol):
    """Messages between the two ends of a pair. A lane carries one message at a time."""

    lanes: int
    memory: list[Tensor] | None
    """Bytes that messages have to lie in, one buffer per lane; None if any tensor will do."""

    device_bytes: int
    """GPU memory that the channel itself takes at this end."""

    def send(self, lane: int, message: Tensor) -> None:
        """Starts sending a contiguous tensor, which must stay as it is until `wait` returns."""
        ...

    def recv(self, lane: int, message: Tensor) -> None:
        """Starts receiving a message of exactly this size."""
        ...

    def wait(self, lane: int, deadline: float) -> None:
        """Until the lane's message is through; nothing to do if there is none.

        Raises `TransferError` when the peer is gone or at the deadline (`time.monotonic`); the channel is
        then dead.
        """
        ...

    def close(self) -> None:
        """Drops this pair's groups, alone and without waiting for the peer."""
        ...


class GroupChannel:
    """What both back ends share; a back end makes one group and waits for one operation."""

    def __init__(self, rank: int, lanes: int, groups: int) -> None:
        self.lanes = lanes
        self.memory: list[Tensor] | None = None
        self.device_bytes = 0
        self._group_count = groups  # lanes share them in turns
        self._peer = 1 - rank
        self._rank = rank
        self._groups: list[Any] = []
        self._stores: list[ControlStore] = []  # their Python half must outlive the groups
        self._works: list[Any] = [None] * lanes
        self._messages: list[Tensor | None] = [None] * lanes
        self._count = [0] * lanes
        self._alive = True

    def connect(self, control: Control, deadline: float) -> None:
        """Both ends call this at the same point of their conversation. Raises `TransferError`."""
        try:
            for number in range(self._group_count):
                self._join(control, f"group{number}", deadline)
            self._check_token(control, deadline)
            for store in self._stores:  # NCCL comes to its store with the first message
                store.detach()
        except BaseException:
            self.close()
            raise

    def send(self, lane: int, message: Tensor) -> None:
        self._start(lane, message, receive=False)

    def recv(self, lane: int, message: Tensor) -> None:
        self._start(lane, message, receive=True)

    def wait(self, lane: int, deadline: float) -> None:
        work, self._works[lane] = self._works[lane], None
        if work is None:
            return
        error = self._wait(work, deadline)
        # an unfinished operation keeps its group's connections open, and so would a traceback that refers to
        # it
        del work
        if error is not None:  # the message stays, as something may still write to it
            self._alive = False
            raise error
        self._messages[lane] = None

    def close(self) -> None:
        self._alive = False
        self._works = [None] * self.lanes
        groups, self._groups = self._groups, []
        for group in groups:
            self._drop(group)
        del groups
        self._stores = []
        self._messages = [None] * self.lanes

    def _start(self, lane: int, message: Tensor, receive: bool) -> None:
        if not self._alive or self._works[lane] is not None:
            raise RuntimeError(f"lane {lane}: busy or closed")
        tag, self._count[lane] = self._count[lane], (self._count[lane] + 1) % (1 << 30)
        content = message.view(torch.uint8)
        self._messages[lane] = content
        group = self._groups[lane % self._group_count]
        try:
            operation = group.recv if receive else group.send
            self._works[lane] = operation([content], self._peer, tag)
        except RuntimeError as error:
            self._alive = False
            failure = self._store_error() or peer_gone(f"pair group: {first_line(error)}")
        else:
            return
        del group, operation  # a traceback that refers to a group would keep it
        raise failure

    def _join(self, control: Control, name: str, deadline: float) -> None:
        store = ControlStore(control, name, deadline)
        self._stores.append(store)
        failure: TransferError | None = None
        try:
            self._groups.append(self._make(store, control.local_host, deadline))
        except TransferError:
            raise
        except Exception as error:
            failure = self._store_error() or peer_gone(f"pair group: {first_line(error)}")
        if failure is not None:
            raise failure

    def _store_error(self) -> TransferError | None:
        """What failed while a group was being made; torch wraps it in errors of its own."""
        return next((store.error for store in self._stores if store.error is not None), None)

    def _check_token(self, control: Control, deadline: float) -> None:
        """The source tells a random token over the control connection and every lane; each end compares."""
        device = self._token_device()
        if self._rank == SOURCE:
            token = secrets.token_bytes(TOKEN_BYTES)
            control.send({"op": "token", "token": token}, deadline)
        else:
            token = control.recv(deadline).get("token") or b""
            if not isinstance(token, bytes) or len(token) != TOKEN_BYTES:
                raise bad_message(f"token: must be {TOKEN_BYTES} bytes")
        for lane in range(self.lanes):
            for sender in (SOURCE, PULLER):
                if self._rank == sender:
                    self.send(lane, torch.tensor(list(token), dtype=torch.uint8, device=device))
                    self.wait(lane, deadline)
                    continue
                received = torch.zeros(TOKEN_BYTES, dtype=torch.uint8, device=device)
                self.recv(lane, received)
                self.wait(lane, deadline)
                if not hmac.compare_digest(bytes(received.tolist()), token):
                    raise TransferError(
                        "FAILED_PRECONDITION", "unauthenticated", "pair group: a stranger answered"
                    )

    @abstractmethod
    def _make(self, store: ControlStore, local_host: str, deadline: float) -> Any:
        """One two-rank group, connected."""

    @abstractmethod
    def _wait(self, work: Any, deadline: float) -> TransferError | None: ...

    @abstractmethod
    def _drop(self, group: Any) -> None: ...

    @abstractmethod
    def _token_device(self) -> torch.device: ...


class GlooChannel(GroupChannel):
    """TCP by Gloo. Two lanes, each with its own connection and I/O thread.

    Gloo's I/O thread spins while another thread of its process is inside `recv` of the same group, and when
    that thread loses its core meanwhile the spinning lasts for its whole time slice (2 to 3 ms per message
    were measured on two cores). With a lane per message in flight nobody posts on a group whose data is
    arriving.
    """

    def __init__(self, rank: int, lanes: int = 2) -> None:
        super().__init__(rank, lanes, groups=lanes)

    def _make(self, store: ControlStore, local_host: str, deadline: float) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = left(deadline, "pair group")
        options._threads = 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_host)]
        return dist.ProcessGroupGloo(store, self._rank, 2, options)

    def _wait(self, work: Any, deadline: float) -> TransferError | None:
        try:
            work.wait(left(deadline, "message"))
        except TransferError as error:
            return error
        except RuntimeError as error:
            # a wait that timed out leaves a Gloo pair unusable, so both kinds end the channel
            text = first_line(error)
            return timed_out("message") if "Timed out" in text else peer_gone(f"message: {text}")
        return None

    def _drop(self, group: Any) -> None:
        """Nothing to call: a Gloo group closes its connections when the last reference goes."""

    def _token_device(self) -> torch.device:
        return torch.device("cpu")


def open_channel(
    kind: str,
    rank: int,
    device: torch.device,
    control: Control,
    lane_bytes: int,
    deadline: float,
    otherwise: str = "gloo",
    lanes: LanePool | None = None,
) -> tuple[Channel, str]:
    """Makes the channel to the peer at the other end of `control`, which calls this at the same time; the
    channel, and of which kind it has become.

    `kind`: "gloo", "nccl", or for two processes of one host "memory" or "ipc"; where that turns out not to be
    possible, "ipc" becomes `otherwise` and "memory" "gloo". `device`: where the caller's pages are;
    `lane_bytes`: the largest message; `lanes`: what a source shares by "ipc". Raises `TransferError`; the
    control connection is then of no more use.
    """
    if kind == "ipc":
        from distserve.transfer import ipc

        if rank == SOURCE:
            assert lanes is not None
            mapped = ipc.offer(control, lanes, device, deadline)
        else:
            mapped = ipc.attach(control, device, lane_bytes, deadline)
        if mapped is not None:
            return mapped, kind
        kind = otherwise
    if kind == "memory":
        shared = (offer if rank == SOURCE else attach)(control, lane_bytes, deadline)
        if shared is not None:
            return shared, kind
    channel: GroupChannel
    if kind == "nccl":
        from distserve.transfer.nccl import NcclChannel

        channel = NcclChannel(rank, device)
    else:
        kind, channel = "gloo", GlooChannel(rank)
    channel.connect(control, deadline)
    return channel, kind


def left(deadline: float, what: str) -> timedelta:
    """Time until `deadline`. Raises `TransferError` if it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise timed_out(what)
    return timedelta(seconds=max(seconds, 0.001))  # zero would mean Gloo's own default


def first_line(error: BaseException) -> str:
    """What an error of torch says before its C++ stack."""
    lines = str(error).splitlines()
    return lines[0][:256] if lines else type(error).__name__
