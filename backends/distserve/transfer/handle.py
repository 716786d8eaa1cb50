"""What a prefill instance hands out for a finished prompt, and what must agree for its KV to be used
elsewhere.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from distserve.core.blocks import blocks_for
from distserve.core.shapes import Shape

LONGEST_TEXT = 256
MOST_RANKS = 1024
NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Layout:
    """How KV lies in the memory of an instance. `layers` and `kv_heads` count the whole model."""

    model_hash: str
    dtype: str
    block_size: int
    layers: int
    kv_heads: int
    head_dim: int
    tp: int
    pp: int
    page_format: str  # order of the axes of a page; only equal formats can be copied

    @property
    def shape(self) -> Shape:
        return Shape(self.tp, self.pp)

    def mismatch(self, other: Layout, name: str = "this instance") -> str | None:
        """Names the first field in which KV of `other` cannot be used here; tp and pp may differ. `name`: of
        who has this layout.
        """
        for field in fields(self):
            if field.name in ("tp", "pp"):
                continue
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name}={theirs!r}: {name} has {mine!r}"
        return None

    def to_wire(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_wire(cls, wire: Any) -> Layout:
        """Raises `ValueError` naming the field."""
        values = _checked(wire, [f.name for f in fields(cls)], "layout")
        for name in ("model_hash", "dtype", "page_format"):
            _text(values, name, "layout")
        for name in ("block_size", "layers", "kv_heads", "head_dim", "tp", "pp"):
            _integer(values, name, 1, "layout")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Handle:
    """A finished prompt at a prefill instance: where its KV is, of which start of the engine, for one use.

    `num_tokens` tokens have KV; `first_token` was sampled after them. `addresses`: one "host:port" per source
    rank.
    """

    instance: str
    epoch: int
    request_id: str
    nonce: bytes
    num_tokens: int
    first_token: int
    layout: Layout
    addresses: tuple[str, ...]

    @property
    def num_blocks(self) -> int:
        return blocks_for(self.num_tokens, self.layout.block_size)

    def difference(self, other: Handle) -> str | None:
        """The first field in which `other` differs; the nonce is compared in constant time."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name == "nonce":
                if not hmac.compare_digest(mine, theirs):
                    return "nonce"
            elif mine != theirs:
                return field.name
        return None

    def to_wire(self) -> dict[str, Any]:
        """Plain maps, lists, strings, integers and bytes, for msgpack."""
        wire = {field.name: getattr(self, field.name) for field in fields(self)}
        return wire | {"layout": self.layout.to_wire(), "addresses": list(self.addresses)}

    @classmethod
    def from_wire(cls, wire: Any) -> Handle:
        """Raises `ValueError` naming the field."""
        values = _checked(wire, [f.name for f in fields(cls)], "handle")
        _text(values, "instance", "handle")
        _text(values, "request_id", "handle")
        _integer(values, "epoch", 0, "handle")
        _integer(values, "num_tokens", 1, "handle")
        _integer(values, "first_token", 0, "handle")
        nonce = values["nonce"]
        if not isinstance(nonce, bytes) or len(nonce) != NONCE_BYTES:
            raise ValueError(f"handle.nonce: must be {NONCE_BYTES} bytes")
        values["layout"] = layout = Layout.from_wire(values["layout"])
        addresses = values["addresses"]
        if not isinstance(addresses, (list, tuple)) or not all(isinstance(a, str) for a in addresses):
            raise ValueError(f"handle.addresses={addresses!r}: must be a list of host:port")
        ranks = layout.tp * layout.pp
        if ranks > MOST_RANKS or len(addresses) != ranks:
            raise ValueError(
                f"handle.addresses: {len(addresses)} given, tp={layout.tp} x pp={layout.pp} needs {ranks}"
            )
        for address in addresses:
            split_address(address)
        return cls(**values | {"addresses": tuple(addresses)})


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of "host:port"; an IPv6 host stands in brackets. Raises `ValueError`."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if (
        len(address) > LONGEST_TEXT
        or not host
        or not port.isascii()
        or not port.isdecimal()
        or not 0 < int(port) < 65536
    ):
        raise ValueError(f"address={address[:LONGEST_TEXT]!r}: must be host:port with a port in [1, 65535]")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _checked(wire: Any, names: list[str], where: str) -> dict[str, Any]:
    if not isinstance(wire, Mapping):
        raise ValueError(f"{where}: must be a map, found {type(wire).__name__}")
    for key in wire:
        if key not in names:
            raise ValueError(f"{where}: unknown key {str(key)[:LONGEST_TEXT]!r}; known: {', '.join(names)}")
    for name in names:
        if name not in wire:
            raise ValueError(f"{where}: missing key {name!r}")
    return dict(wire)


def _text(values: Mapping[str, Any], name: str, where: str) -> None:
    value = values[name]
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_TEXT:
        raise ValueError(f"{where}.{name}: must be a string of 1 to {LONGEST_TEXT} characters")


def _integer(values: Mapping[str, Any], name: str, least: int, where: str) -> None:
    value = values[name]
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(f"{where}.{name}={value!r}: must be an integer of at least {least}")
