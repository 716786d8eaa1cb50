"""What the I/O thread and the transfer threads ask of the engine loop, in the order they asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from distserve.engine.requests import EngineRequest, Owner

if TYPE_CHECKING:
    from concurrent.futures import Future

    from distserve.transfer.puller import TransferStats


@dataclass(frozen=True, slots=True)
class Submit:
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Manage:
    """`cancel`, `release` or `renew` of an owner's ids; unknown ones are no error."""

    kind: Literal["cancel", "release", "renew"]
    owner: Owner
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DropOwner:
    """The owner is gone, or has a newer epoch: all its requests and leases end."""

    owner: Owner


@dataclass(frozen=True, slots=True)
class Pulled:
    """The copy for this request has ended, well or not; nothing writes to its blocks any more."""

    key: str
    future: Future[TransferStats]


Op = Submit | Manage | DropOwner | Pulled
