"""A pair's groups meet over the control connection, whenever their back end comes to it."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import torch
from test_transfer_control import soon

from distserve.transfer.channel import PULLER, SOURCE, TOKEN_BYTES, GlooChannel
from distserve.transfer.control import Control
from distserve.transfer.errors import TransferError
from distserve.transfer.rendezvous import ControlStore


class LazyGroup:
    """Is made with its first message, as NCCL's communicators are: the store is asked for it only then."""

    def __init__(self, make: Any) -> None:
        self._make, self._group = make, None

    def send(self, *arguments: Any) -> Any:
        return self._made().send(*arguments)

    def recv(self, *arguments: Any) -> Any:
        return self._made().recv(*arguments)

    def _made(self) -> Any:
        self._group = self._group or self._make()
        return self._group


class LazyChannel(GlooChannel):
    def _make(self, store: ControlStore, local_host: str, deadline: float) -> Any:
        made = super()._make
        return LazyGroup(lambda: made(store, local_host, deadline))


@pytest.mark.parametrize("kind", [GlooChannel, LazyChannel])
def test_two_ends_connect_and_then_leave_the_connection_alone(kind: type[GlooChannel]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = Control(socket.create_connection(listener.getsockname())), Control(listener.accept()[0])
    channels = kind(SOURCE), kind(PULLER)
    failures: list[TransferError] = []

    def connect(rank: int) -> None:
        try:
            ends[rank].unlock(None, None)
            channels[rank].connect(ends[rank], soon(20.0))
        except TransferError as error:
            failures.append(error)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (SOURCE, PULLER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not failures
    messages = [torch.arange(7, dtype=torch.uint8) + lane for lane in range(2)]
    got = [torch.zeros(7, dtype=torch.uint8) for _ in messages]
    for lane, (message, buffer) in enumerate(zip(messages, got, strict=True)):
        channels[SOURCE].send(lane, message)
        channels[PULLER].recv(lane, buffer)
        for channel in channels:
            channel.wait(lane, soon())
        assert torch.equal(buffer, message)
    ends[SOURCE].send({"op": "ready"}, soon())
    assert ends[PULLER].recv(soon()) == {"op": "ready"}  # nothing else was on the way
    for channel, end in zip(channels, ends, strict=True):
        channel.close()
        end.close()


def test_what_the_store_met_is_the_error_also_with_the_first_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = Control(socket.create_connection(listener.getsockname())), Control(listener.accept()[0])
    for end in ends:
        end.unlock(None, None)
    ends[SOURCE].send({"op": "token", "token": bytes(TOKEN_BYTES)}, soon())
    ends[SOURCE].send({"op": "rubbish"}, soon())
    with pytest.raises(TransferError) as error:
        LazyChannel(PULLER).connect(ends[PULLER], soon())
    assert error.value.code == "INVALID_ARGUMENT"
    assert "op='rubbish'" in str(error.value)
    for end in ends:
        end.close()
