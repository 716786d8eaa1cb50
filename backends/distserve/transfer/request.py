"""What a puller asks of a source and what the source answers, checked field by field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape
from distserve.transfer.control import Message
from distserve.transfer.errors import TransferError, bad_message
from distserve.transfer.handle import LONGEST_TEXT, MOST_RANKS, Handle, Layout
from distserve.transfer.leases import Claimant

LONGEST_TIMEOUT_S = 3600.0
CHANNELS = ("", "gloo", "nccl", "memory", "ipc")


@dataclass(frozen=True, slots=True)
class PullRequest:
    """One destination rank asks one source rank for its slices of a handle's KV.

    `units`: size of the puller's staging buffers; `host`: `memory.host_id`, or empty where memory is not to
    be shared; `timeout_s`: what is left until its deadline (clocks differ).
    """

    handle: Handle
    layout: Layout
    claimant: Claimant
    rank: int
    num_blocks: int
    units: int
    backend: str
    host: str
    timeout_s: float

    def to_wire(self) -> Message:
        return {
            "op": "pull",
            "handle": self.handle.to_wire(),
            "layout": self.layout.to_wire(),
            "instance": self.claimant.instance,
            "epoch": self.claimant.epoch,
            "rank": self.rank,
            "num_blocks": self.num_blocks,
            "units": self.units,
            "backend": self.backend,
            "host": self.host,
            "timeout_s": self.timeout_s,
        }

    @classmethod
    def from_wire(cls, wire: Message) -> PullRequest:
        """Raises `TransferError` (INVALID_ARGUMENT) naming the field."""
        try:
            handle, layout = Handle.from_wire(wire.get("handle")), Layout.from_wire(wire.get("layout"))
            shape = Shape(layout.tp, layout.pp)
        except (ValueError, ConfigError) as error:
            raise bad_message(str(error)) from None
        if shape.ranks > MOST_RANKS:
            raise bad_message(f"layout: tp={shape.tp} x pp={shape.pp}; allowed are {MOST_RANKS} ranks")
        rank = _integer(wire, "rank", 0, shape.ranks - 1)
        for name in ("instance", "backend", "host"):
            if not isinstance(wire.get(name), str) or len(wire[name]) > LONGEST_TEXT:
                raise bad_message(f"{name}: must be a string of at most {LONGEST_TEXT} characters")
        timeout_s = wire.get("timeout_s")
        if not isinstance(timeout_s, float) or not 0 < timeout_s <= LONGEST_TIMEOUT_S:
            raise bad_message(f"timeout_s={timeout_s!r}: must be in (0, {LONGEST_TIMEOUT_S}]")
        return cls(
            handle=handle,
            layout=layout,
            claimant=Claimant(wire["instance"], _integer(wire, "epoch", 0, 2**63 - 1), shape),
            rank=rank,
            num_blocks=_integer(wire, "num_blocks", 1, 2**40),
            units=_integer(wire, "units", 1, 2**40),
            backend=wire["backend"],
            host=wire["host"],
            timeout_s=timeout_s,
        )


@dataclass(frozen=True, slots=True)
class Accepted:
    """The source's answer: `messages` messages of at most `units` units, `bytes` together. Both must agree on
    them. `channel`: the kind of a new one, and `otherwise` what "ipc" becomes where it is not possible.
    """

    messages: int
    units: int
    bytes: int
    channel: str
    otherwise: str = ""

    def to_wire(self) -> Message:
        return {
            "ok": True,
            "messages": self.messages,
            "units": self.units,
            "bytes": self.bytes,
            "channel": self.channel,
            "otherwise": self.otherwise,
        }

    @classmethod
    def from_wire(cls, wire: Message) -> Accepted:
        """Raises `TransferError` (INVALID_ARGUMENT) naming the field."""
        kinds = (wire.get("channel"), wire.get("otherwise"))
        if wire.get("ok") is not True or not set(kinds) <= set(CHANNELS):
            raise bad_message("answer to a pull: neither accepted nor refused")
        return cls(
            _integer(wire, "messages", 0, 2**40),
            _integer(wire, "units", 0, 2**40),
            _integer(wire, "bytes", 0, 2**60),
            str(kinds[0]),
            str(kinds[1]),
        )


def refusal_to_wire(error: TransferError) -> Message:
    return {"ok": False, "code": error.code, "reason": error.reason, "message": str(error)[:1024]}


def refusal_from_wire(wire: Message) -> TransferError:
    code, reason, message = (str(wire.get(name))[:1024] for name in ("code", "reason", "message"))
    return TransferError(code, reason, f"source: {message}")


def _integer(wire: Message, name: str, least: int, most: int) -> int:
    value: Any = wire.get(name)
    if type(value) is not int or not least <= value <= most:
        raise bad_message(f"{name}={value!r}: must be an integer in [{least}, {most}]")
    return value
