"""Handles and requests on the wire: what was written is read, anything else is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest

from distserve.core.shapes import Shape
from distserve.transfer.errors import TransferError
from distserve.transfer.handle import Handle, Layout, join_address, new_nonce, split_address
from distserve.transfer.leases import Claimant
from distserve.transfer.request import Accepted, PullRequest

LAYOUT = Layout("m", "bf16", 16, 4, 4, 64, 2, 1, "nhd")
HANDLE = Handle("p0", 3, "r1", new_nonce(), 33, 7, LAYOUT, ("127.0.0.1:4000", "[::1]:4001"))
REQUEST = PullRequest(
    HANDLE, replace(LAYOUT, tp=1, pp=2), Claimant("d0", 1, Shape(1, 2)), 1, 3, 100, "gloo", "", 5.0
)


def through_msgpack(wire: dict[str, Any]) -> Any:
    return msgpack.unpackb(msgpack.packb(wire))


def test_what_is_written_is_read() -> None:
    assert Handle.from_wire(through_msgpack(HANDLE.to_wire())) == HANDLE
    assert PullRequest.from_wire(through_msgpack(REQUEST.to_wire())) == REQUEST
    accepted = Accepted(3, 20, 4096, "memory")
    assert Accepted.from_wire(through_msgpack(accepted.to_wire())) == accepted
    assert HANDLE.num_blocks == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("instance", ""),
        ("instance", 3),
        ("request_id", "x" * 300),
        ("epoch", -1),
        ("epoch", True),
        ("num_tokens", 0),
        ("num_tokens", 2**63),
        ("first_token", 1.5),
        ("nonce", b"short"),
        ("nonce", "sixteen letters.."),
        ("layout", None),
        ("addresses", ["127.0.0.1:4000"]),
        ("addresses", ["127.0.0.1:4000", 5]),
        ("addresses", ["127.0.0.1:4000", "nowhere"]),
        ("addresses", ["127.0.0.1:4000", "host:70000"]),
        ("extra", 1),
    ],
)
def test_a_wrong_field_of_a_handle_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match="address" if field == "addresses" else field):
        Handle.from_wire(HANDLE.to_wire() | {field: value})


@pytest.mark.parametrize("field", sorted(HANDLE.to_wire()))
def test_a_missing_field_of_a_handle_is_named(field: str) -> None:
    wire = HANDLE.to_wire()
    del wire[field]
    with pytest.raises(ValueError, match=field):
        Handle.from_wire(wire)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("handle", 1),
        ("layout", {}),
        ("instance", None),
        ("epoch", "1"),
        ("rank", 2),
        ("num_blocks", 0),
        ("units", 0),
        ("backend", 1),
        ("host", "x" * 300),
        ("timeout_s", 0.0),
        ("timeout_s", float("nan")),
    ],
)
def test_a_wrong_field_of_a_request_is_named(field: str, value: object) -> None:
    with pytest.raises(TransferError, match=field):
        PullRequest.from_wire(REQUEST.to_wire() | {field: value})


def test_shapes_may_differ_and_nothing_else() -> None:
    assert LAYOUT.mismatch(replace(LAYOUT, tp=4, pp=2)) is None
    for field, value in [("model_hash", "n"), ("dtype", "fp32"), ("head_dim", 128), ("page_format", "x")]:
        message = LAYOUT.mismatch(replace(LAYOUT, **{field: value}))
        assert message is not None
        assert message.startswith(field)
        assert repr(value) in message


def test_differences_are_found() -> None:
    assert HANDLE.difference(HANDLE) is None
    assert HANDLE.difference(replace(HANDLE, nonce=new_nonce())) == "nonce"
    assert HANDLE.difference(replace(HANDLE, first_token=8)) == "first_token"


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 80), ("::1", 65535), ("node-3.example", 1)])
def test_addresses_survive(host: str, port: int) -> None:
    assert split_address(join_address(host, port)) == (host, port)
