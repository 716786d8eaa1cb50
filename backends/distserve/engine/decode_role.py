"""A decode instance: takes over prompts that another instance has computed, and decodes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from distserve.core.blocks import BlockManager
from distserve.core.decode_scheduler import DecodeScheduler
from distserve.engine.inbox import Inbox
from distserve.engine.ops import Op, Pulled
from distserve.engine.requests import EngineRequest
from distserve.engine.roles import Depth, Listener
from distserve.serving.schema import ErrorCode, ServingError
from distserve.transfer.errors import TransferError
from distserve.transfer.handle import Handle

if TYPE_CHECKING:
    from distserve.transfer.puller import TransferStats


class Puller(Protocol):
    """Copies KV into blocks of ours, in threads of its own. Nothing is written after the future is done."""

    def pull(self, handle: Handle, dst_blocks: Sequence[int], deadline: float) -> Future[TransferStats]: ...

    def cancel(self, future: Future[TransferStats]) -> None:
        """The copy is to end soon, with an error."""
        ...

    @property
    def pairs(self) -> int:
        """Source ranks that a connection is kept to."""
        ...

    def close(self) -> None: ...


OVERDUE_S = 1.0
"""A request does not wait for a copy that has not ended so long after its deadline."""


class Copy(NamedTuple):
    """A copy that runs, and the blocks that it writes to."""

    blocks: list[int]
    future: Future[TransferStats]
    deadline_s: float


class DecodeRole:
    """Requests with a handle wait for blocks, then for their KV; those without are prefilled here.

    The copy is second owner of the blocks that it writes to: a request that leaves meanwhile does not
    free them.
    """

    ahead = 0

    def __init__(
        self,
        scheduler: DecodeScheduler,
        blocks: BlockManager,
        puller: Puller,
        inbox: Inbox[Op],
        transfer_timeout_s: float,
    ) -> None:
        self.scheduler = scheduler
        self.blocks = blocks
        self._puller = puller
        self._inbox = inbox
        self._timeout_s = transfer_timeout_s
        self._arriving: dict[str, EngineRequest] = {}  # incoming or being pulled
        self._copies: dict[str, Copy] = {}

    def accept(self, state: EngineRequest) -> None:
        if state.handle is None:
            self.scheduler.waiting.append(state.request)
            return
        self._arriving[state.key] = state
        self.scheduler.add(state.request)

    def hand_out(self, state: EngineRequest, now: float) -> dict[str, Any] | None:
        return None

    def settle(self) -> None:
        pass

    def advance(self, now: float, listener: Listener) -> None:
        for key in [key for key in self._arriving if self._overdue(key, now)]:
            state = self._arriving[key]
            self.cancel(state)  # the copy keeps its blocks
            late = TransferError(
                "DEADLINE_EXCEEDED", "timeout", f"not ended {OVERDUE_S:g} s after its deadline"
            )
            listener.failed(state, transfer_failure(late))
        for request in self.scheduler.admit():
            state = self._arriving[request.id]
            self._pull(state, now)
            listener.admitted(state)

    def _overdue(self, key: str, now: float) -> bool:
        copy = self._copies.get(key)
        return copy is not None and now >= copy.deadline_s + OVERDUE_S

    def _pull(self, state: EngineRequest, now: float) -> None:
        assert state.handle is not None
        key, blocks, deadline = state.key, list(state.request.blocks), now + self._timeout_s
        self.blocks.hold(blocks)
        try:
            future = self._puller.pull(state.handle, blocks, deadline)
        except TransferError as error:
            future = Future()
            future.set_exception(error)
        self._copies[key] = Copy(blocks, future, deadline)
        future.add_done_callback(lambda done: self._inbox.post(Pulled(key, done)))

    def pulled(self, event: Pulled, listener: Listener) -> None:
        self.blocks.drop(self._copies.pop(event.key).blocks)
        state = self._arriving.pop(event.key, None)
        if state is None:
            return  # cancelled meanwhile
        error = event.future.exception(0)
        if error is None:
            self.scheduler.start(state.request)
            listener.started(state, event)
        else:
            self.scheduler.cancel(event.key)
            listener.failed(state, transfer_failure(error))

    def cancel(self, state: EngineRequest) -> None:
        self._arriving.pop(state.key, None)
        self.scheduler.cancel(state.key)
        copy = self._copies.get(state.key)
        if copy is not None:
            self._puller.cancel(copy.future)

    def renew(self, states: Iterable[EngineRequest], now: float) -> None:
        pass

    def next_deadline(self) -> float | None:
        due = (copy.deadline_s + OVERDUE_S for key, copy in self._copies.items() if key in self._arriving)
        return min(due, default=None)

    def depth(self) -> Depth:
        queue = self.scheduler
        return Depth(
            queued=len(queue.incoming) + len(queue.waiting),
            queued_tokens=queue.waiting_tokens,
            running=queue.decoding,
            leases=0,
            transfers_pending=len(self._copies),
            credits=queue.credits(),
        )

    def details(self) -> dict[str, Any]:
        return {"transfer_pairs": self._puller.pairs}

    def close(self) -> None:
        self._puller.close()


def transfer_failure(error: BaseException) -> ServingError:
    """What the owner is told: another attempt may succeed unless the handle itself was refused."""
    code: ErrorCode = "UNAVAILABLE"
    if isinstance(error, TransferError) and error.code == "FAILED_PRECONDITION":
        code = "FAILED_PRECONDITION"
    return ServingError(code, f"kv transfer failed: {error or type(error).__name__}")
