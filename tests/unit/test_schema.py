"""Messages and frames: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.serving import schema
from distserve.serving.frames import pack_frame, read_frame
from distserve.serving.schema import ServingError, decode, decode_reply, encode, error_reply, ok_reply

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text().filter(lambda key: key != "v"), VALUES, max_size=5))
def test_messages_round_trip(message: dict[str, Any]) -> None:
    assert decode(encode(message)) == {"v": schema.PROTOCOL_VERSION, **message}


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ServingError) as caught:
        decode(data)
    assert caught.value.code == "INVALID_ARGUMENT"


def test_other_versions_are_refused() -> None:
    with pytest.raises(ServingError, match="protocol version 2, this side speaks 1"):
        decode(msgpack.packb({"v": 2, "op": "status"}))


def test_long_messages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(ServingError, match="allowed are 100"):
        encode({"prompt": list(range(1000))})
    with pytest.raises(ServingError, match="allowed are 100"):
        decode(b"x" * 101)


def test_errors_cross_and_unknown_codes_become_internal() -> None:
    with pytest.raises(ServingError) as caught:
        decode_reply(error_reply(ServingError("NOT_FOUND", "no such thing")))
    assert (caught.value.code, caught.value.message) == ("NOT_FOUND", "no such thing")
    assert decode_reply(ok_reply(seq=3))["seq"] == 3
    assert ServingError.from_wire({"code": "STRANGE", "message": "m"}).code == "INTERNAL"
    assert ServingError.from_wire(None).code == "INTERNAL"
    with pytest.raises(ServingError):
        decode_reply(encode({"ok": 1}))


def test_tensor_names_are_unique_and_those_of_both_servers_are_there() -> None:
    inputs = [spec.name for spec in schema.ORCHESTRATOR_INPUTS]
    outputs = [spec.name for spec in schema.ORCHESTRATOR_OUTPUTS]
    assert len(set(inputs)) == len(inputs)
    assert len(set(outputs)) == len(outputs)
    assert {"text_input", "sampling_parameters", "stream", "exclude_input_in_output", "image"} <= set(inputs)
    assert {"max_tokens", "stop_words", "end_id", "beam_width", "random_seed"} <= set(inputs)
    assert {"text_output", "finish_reason", "logprobs", "cum_log_probs", "control_output"} <= set(outputs)


@given(st.integers(0, 2**40), st.binary(max_size=3000))
def test_frames_round_trip(call_id: int, payload: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack_frame(call_id, payload) * 2)
        assert read_frame(theirs) == read_frame(theirs) == (call_id, payload)
        ours.close()
        assert read_frame(theirs) is None


@pytest.mark.parametrize("body", [b"\x01", msgpack.packb([1]), msgpack.packb(["a", b"b"]), b"\xc1"])
def test_malformed_frames_are_errors(body: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(struct.pack("<I", len(body)) + body)
        with pytest.raises(ValueError):
            read_frame(theirs)


def test_a_frame_beyond_the_limit_is_not_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(struct.pack("<I", 2**31))
        with pytest.raises(ValueError, match="allowed are"):
            read_frame(theirs)


@pytest.mark.parametrize("data", [b"\x81\x90\x01", b"\x81\x80\x01"])
def test_maps_with_keys_that_python_cannot_hash_are_refused(data: bytes) -> None:
    with pytest.raises(ServingError, match="not msgpack"):
        decode(data)
