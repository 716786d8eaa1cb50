"""A `torch.distributed` store of two ranks that travels over their control connection.

A pair needs no listening store of its own: what the group's two ends tell each other (addresses, NCCL's
unique id) goes through the connection that has just been authenticated.
"""

from __future__ import annotations

import datetime

import torch.distributed as dist

from distserve.transfer.control import Control
from distserve.transfer.errors import TransferError, bad_message

LARGEST_VALUE = 1 << 16


class ControlStore(dist.Store):  # type: ignore[name-defined,misc]
    """Keys of one process group while it is being made. `error` keeps what went wrong inside the group's C++
    code.
    """

    def __init__(self, control: Control, prefix: str, deadline: float) -> None:
        super().__init__()
        self._control: Control | None = control
        self._prefix = prefix
        self._deadline = deadline
        self._values: dict[str, bytes] = {}
        self.error: TransferError | None = None

    def detach(self) -> None:
        """The group is connected: from here on the store is a plain local map, the connection another's."""
        self._control = None

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = content
        if self._control is None:
            return
        try:
            self._control.send(
                {"op": "store", "key": f"{self._prefix}/{key}", "value": content}, self._deadline
            )
        except TransferError as error:
            self.error = error
            raise

    def get(self, key: str) -> bytes:
        while key not in self._values:
            if self._control is None:
                raise KeyError(key)
            try:
                self._receive(self._control)
            except TransferError as error:
                self.error = error
                raise
        return self._values[key]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _receive(self, control: Control) -> None:
        message = control.recv(self._deadline)
        key, value = message.get("key"), message.get("value")
        if message.get("op") != "store" or not isinstance(key, str) or not isinstance(value, bytes):
            raise bad_message(f"op={message.get('op')!r}: allowed while a pair group is made is 'store'")
        if len(value) > LARGEST_VALUE or not key.startswith(f"{self._prefix}/"):
            raise bad_message(f"store key {key[:64]!r} with {len(value)} bytes does not belong here")
        self._values[key.removeprefix(f"{self._prefix}/")] = value
