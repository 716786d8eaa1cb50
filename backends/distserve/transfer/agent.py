"""The transfer side of a further rank: does for the leader what the leader does for rank 0 itself.

Messages are msgpack maps. From the leader: `source` or `puller` opens this rank's end; then `lease`, `renew`
and `release` on a prefill instance, `pull` and `cancel` on a decode instance, and now and then `ping`. To the
leader: `opened`, `leased`, `released`, `pulled` and `pong`.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, Protocol

import msgpack
import torch

from distserve.core.shapes import Shape
from distserve.transfer.errors import TransferError
from distserve.transfer.handle import Handle, Layout
from distserve.transfer.leases import LeaseTable
from distserve.transfer.packing import Pages
from distserve.transfer.pull import TransferStats
from distserve.transfer.puller import KVPuller
from distserve.transfer.source import KVSource

Message = dict[str, Any]


class Frames(Protocol):
    """The connection to the leader (`worker.link.Link`)."""

    def send(self, frame: bytes) -> None: ...

    def receive(self, timeout_s: float | None = None) -> bytes: ...

    def end(self) -> None: ...


class RankAgent:
    """`run` is the body of a thread; other threads (senders, receivers) report through it. `host`: the
    address of this rank for those of other instances, with whom it shares `secret`.
    """

    def __init__(
        self, cache: Pages, frames: Frames, shape: Shape, rank: int, host: str, secret: bytes | None
    ) -> None:
        self._cache = cache
        self._frames = frames
        self._shape = shape
        self._rank = rank
        self._host, self._secret = host, secret
        self._leases = LeaseTable(time.monotonic, self._report_released)
        self._reporting = threading.Lock()  # news of one lease leave in order
        self._source: KVSource | None = None
        self._puller: KVPuller | None = None
        self._pulls: dict[int, Future[TransferStats]] = {}

    def run(self) -> None:
        """Until the leader ends the connection, or something here goes wrong, which ends it as well."""
        device = self._cache.pages(0)[0].device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread, which would begin on the first GPU
        try:
            while True:
                until = self._leases.next_expiry()
                wait_s = None if until is None else max(0.0, until - time.monotonic())
                try:
                    message = msgpack.unpackb(self._frames.receive(wait_s))
                except TimeoutError:
                    self._leases.expire()
                    continue
                self._handle(message)
        except EOFError:
            pass
        finally:
            self._frames.end()  # the leader notices, whatever it was
            self._close()

    def stop(self) -> None:
        """Ends `run`. From any thread."""
        self._frames.end()

    def _close(self) -> None:
        if self._source is not None:
            self._source.close()
        if self._puller is not None:
            self._puller.close()

    def _handle(self, message: Message) -> None:
        op = message["op"]
        if op == "pull":
            self._pull(message)
        elif op == "cancel":
            future = self._pulls.get(message["id"])
            if future is not None and self._puller is not None:
                self._puller.cancel(future)
        elif op == "lease":
            handle = Handle.from_wire(message["handle"])
            self._leases.add(handle, message["blocks"], message["ttl_s"])
            self._send({"op": "leased", "id": handle.request_id})
        elif op == "renew":
            self._leases.renew(message["ids"], message["ttl_s"])
        elif op == "release":
            self._leases.release(message["ids"])
        elif op == "ping":
            self._send({"op": "pong"})
        elif op == "source":
            self._open_source(message)
        elif op == "puller":
            layout = Layout.from_wire(message["layout"])
            self._puller = KVPuller(
                self._cache,
                self._shape,
                self._rank,
                layout,
                message["instance"],
                message["epoch"],
                secret=self._secret,
                backend=message["backend"],
            )
            self._send({"op": "opened", "address": ""})
        else:
            raise ValueError(f"op={op!r}: not known to a rank")

    def _open_source(self, message: Message) -> None:
        try:
            self._source = KVSource(
                self._cache,
                self._leases,
                self._shape,
                self._rank,
                Layout.from_wire(message["layout"]),
                message["instance"],
                message["epoch"],
                host=self._host,
                secret=self._secret,
                backend=message["backend"],
                timeout_s=message["timeout_s"],
            )
        except (TransferError, ValueError, OSError) as error:
            self._send({"op": "opened", "error": str(error)})
            return
        self._send({"op": "opened", "address": self._source.address})

    def _pull(self, message: Message) -> None:
        assert self._puller is not None
        number, deadline = message["id"], time.monotonic() + message["timeout_s"]
        try:
            future = self._puller.pull(Handle.from_wire(message["handle"]), message["blocks"], deadline)
        except TransferError as error:
            future = Future()
            future.set_exception(error)
        self._pulls[number] = future
        future.add_done_callback(lambda done: self._report_pulled(number, done))

    def _report_pulled(self, number: int, future: Future[TransferStats]) -> None:
        self._pulls.pop(number, None)
        error = future.exception(0)
        report: Message = {"op": "pulled", "id": number}
        if error is None:
            report["stats"] = asdict(future.result(0))
        elif isinstance(error, TransferError):
            report["error"] = [error.code, error.reason, str(error)]
        else:
            report["error"] = ["INTERNAL", "internal", f"{type(error).__name__}: {error}"]
        self._send(report)

    def _report_released(self) -> None:
        with self._reporting:
            for key, _ in self._leases.released():
                outcome = self._leases.outcome(key)
                stats = asdict(self._source.stats()) if self._source is not None else {}
                self._send({"op": "released", "id": key, "outcome": outcome, "stats": stats})

    def _send(self, message: Message) -> None:
        try:
            self._frames.send(msgpack.packb(message))
        except OSError:
            self._frames.end()  # the leader is gone: so ends `run`
