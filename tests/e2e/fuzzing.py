"""Hypothesis strategies for everything that a client may send, and judges of what must come back."""

from __future__ import annotations

import http.client
import json
import math
import struct
from typing import Any

import grpc
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tritonclient.grpc import service_pb2, service_pb2_grpc

from distserve.serving.params import ALIASES
from distserve.serving.schema import ERROR_CODES, ORCHESTRATOR_INPUTS, ORCHESTRATOR_OUTPUTS, TensorSpec
from model_zoo import CONTEXT, VOCAB

TIMEOUT_S = 30.0
ACCEPTABLE = frozenset({"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"})
"""Of a healthy server. INTERNAL would be a mistake of ours, UNAVAILABLE a part that has died. What needs the
operator's key may be refused for want of it, too."""

_FORMATS = {"TYPE_BOOL": "?", "TYPE_INT32": "i", "TYPE_UINT32": "I", "TYPE_UINT64": "Q", "TYPE_FP32": "f"}
_NAMES = [spec.name for spec in ORCHESTRATOR_INPUTS if spec.name != "control"]
_INTEGERS = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([VOCAB - 1, VOCAB, CONTEXT, -(2**31), 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1]),
)
_REALS = st.one_of(
    st.floats(-2, 3, width=32), st.sampled_from([math.nan, math.inf, -math.inf, 1e-45, 3e38, -0.0, 0.0, 1.0])
)
_TEXTS = st.one_of(
    st.text(max_size=60),
    st.text("a<|>/s\u0301\u200d\U0001f468\ufffd\x00", max_size=20),
    st.sampled_from(["", "null", "[]", "{}", "</s>", "<|end|>", "../../etc/passwd", "%s%n", "a" * 5000]),
)
_SCALARS = st.one_of(st.none(), st.booleans(), _INTEGERS, _REALS, _TEXTS)
_JSON = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=3)
)


def _right(name: str) -> SearchStrategy[Any]:
    """Mostly allowed values of a parameter, so that requests get past the first check."""
    if name in ("max_tokens", "min_tokens", "min_length"):
        return st.integers(0, 12)
    if name in (
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ):
        return st.floats(0, 2, width=32)
    if name in ("stop", "stop_words"):
        return st.lists(st.text(min_size=1, max_size=5), max_size=3)
    if name == "stop_token_ids":
        return st.lists(st.integers(0, VOCAB - 1), max_size=3)
    if name in ("ttft_slo", "tpot_slo", "deadline"):
        return st.floats(2**-6, 100, width=32)
    if name.startswith("return_") or name in ("stream", "ignore_eos", "exclude_input_in_output"):
        return st.booleans()
    return st.integers(0, 20)


def _value(name: str) -> SearchStrategy[Any]:
    return st.one_of(_right(name), _right(name), _JSON)


_PARAMETERS = st.sampled_from(
    [*_NAMES, *ALIASES, "cancel_key", "logprobs", "n", "best_of", "logit_bias", "temperatur", "id"]
)
_SAMPLING = _PARAMETERS.flatmap(lambda name: st.tuples(st.just(name), _value(name)))
_SAMPLING_JSON = st.one_of(
    st.lists(_SAMPLING, max_size=5).map(lambda pairs: json.dumps(dict(pairs))),
    st.lists(_SAMPLING, max_size=5).map(lambda pairs: json.dumps(dict(pairs))),
    _JSON.map(json.dumps),
    _TEXTS,
    st.integers(1, 3000).map(lambda depth: "[" * depth),
)
_CONTROL = st.one_of(
    _TEXTS,
    _JSON.map(json.dumps),
    st.dictionaries(
        st.sampled_from(["op", "instance", "remove", "wait_s", "key", "cancel_key", "x"]),
        _SCALARS,
        max_size=3,
    ).map(json.dumps),
    st.sampled_from(
        [
            '{"op": "status"}',
            '{"op": "drain", "instance": "../x"}',
            '{"op": "attach", "instance": {}}',
            '{"op": "cancel", "cancel_key": "0123456789abcdef"}',
            '{"op": "cancel", "cancel_key": 7}',
        ]
    ),
)
"""Nothing here stops the server or takes an instance away: clients that may do this are trusted."""


def _raw(spec: TensorSpec, values: list[Any]) -> bytes:
    if spec.dtype == "TYPE_STRING":
        items = [
            value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
            for value in values
        ]
        return b"".join(len(item).to_bytes(4, "little") + item for item in items)
    return b"".join(struct.pack("<" + _FORMATS[spec.dtype], value) for value in values)


def _elements(spec: TensorSpec) -> SearchStrategy[Any]:
    if spec.name == "sampling_parameters":
        return _SAMPLING_JSON
    if spec.name == "control":
        return _CONTROL
    return {
        "TYPE_STRING": st.one_of(_TEXTS, _TEXTS, st.binary(max_size=20)),
        "TYPE_BOOL": st.booleans(),
        "TYPE_INT32": st.one_of(st.integers(0, 20), st.integers(-(2**31), 2**31 - 1)),
        "TYPE_UINT32": st.integers(0, 2**32 - 1),
        "TYPE_UINT64": st.integers(0, 2**64 - 1),
        "TYPE_FP32": st.one_of(st.floats(0, 2, width=32), _REALS),
    }[spec.dtype]


@st.composite
def _tensor(draw: Any, spec: TensorSpec) -> tuple[str, str, list[int], bytes]:
    """Name, type, shape and content: mostly what the model declares, sometimes not."""
    count = 1 if spec.dims == (1,) else draw(st.integers(0, 40))
    if spec.name == "max_tokens":
        values = [draw(st.integers(0, 12))]  # long ones are another test's business
    elif spec.name == "input_ids":
        values = [draw(st.integers(0, VOCAB)) for _ in range(count)]
    else:
        values = [draw(_elements(spec)) for _ in range(count)]
    dtype, shape, raw = (
        spec.dtype.removeprefix("TYPE_").replace("STRING", "BYTES"),
        [count],
        _raw(spec, values),
    )
    fault = draw(st.sampled_from(["none"] * 12 + ["type", "shape", "short", "long", "noise"]))
    if fault == "type":
        dtype = draw(st.sampled_from(["BOOL", "INT32", "INT64", "FP64", "BYTES", "FP16", "", "STRING"]))
    elif fault == "shape":
        shape = draw(st.lists(st.sampled_from([-1, 0, 1, 2, 2**31, 2**62]), max_size=3))
    elif fault == "short":
        raw = raw[:-1]
    elif fault == "long":
        raw += b"\0"
    elif fault == "noise":
        raw = draw(st.binary(max_size=40))
    return spec.name, dtype, shape, raw


@st.composite
def grpc_requests(draw: Any) -> service_pb2.ModelInferRequest:
    """A request that the wire allows."""
    request = service_pb2.ModelInferRequest(model_name="orchestrator", id=draw(st.text(max_size=20)))
    by_name = {spec.name: spec for spec in ORCHESTRATOR_INPUTS}
    names = draw(st.lists(st.sampled_from(_NAMES), max_size=5))
    prompt = draw(
        st.sampled_from([["text_input"], ["input_ids"], ["control"], [], ["text_input", "input_ids"]])
    )
    for name in [*prompt, *names, *(["max_tokens"] if draw(st.integers(0, 9)) else [])]:
        tensor, dtype, shape, raw = draw(_tensor(by_name[name]))
        request.inputs.add(name=tensor, datatype=dtype, shape=shape)
        request.raw_input_contents.append(raw)
    if draw(st.integers(0, 9)) == 0:
        request.inputs.add(name=draw(_TEXTS), datatype="INT32", shape=[1])
        request.raw_input_contents.append(b"\0\0\0\0")
    for name, value in draw(st.lists(st.tuples(_PARAMETERS, _SCALARS), max_size=3)):
        _set(request.parameters[name], value)
    outputs = [spec.name for spec in ORCHESTRATOR_OUTPUTS] + ["no_such_output"]
    for name in draw(st.lists(st.sampled_from(outputs), max_size=4, unique=True)):
        request.outputs.add(name=name)
    return request


def _set(parameter: Any, value: Any) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = str(value).encode("utf-8", "replace").decode()


def http_bodies() -> SearchStrategy[bytes]:
    """Bodies of `generate` and `generate_stream`."""
    given = st.lists(_SAMPLING, max_size=5).map(dict)
    prompts = st.one_of(_TEXTS, _JSON)
    whole = st.tuples(prompts, given, st.integers(0, 12)).map(
        lambda parts: {"text_input": parts[0], **parts[1], "max_tokens": parts[2]}
    )
    bodies = st.one_of(whole, whole, given, _JSON)
    return st.one_of(bodies.map(lambda body: json.dumps(body).encode()), st.binary(max_size=40))


def check_grpc(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, request: service_pb2.ModelInferRequest
) -> None:
    """Exactly one final response or one error, which is the last message and says what is wrong."""
    messages = list(stub.ModelStreamInfer(iter([request]), timeout=TIMEOUT_S))
    ends = [
        m
        for m in messages
        if m.error_message or m.infer_response.parameters["triton_final_response"].bool_param
    ]
    assert len(ends) == 1, [str(m)[:300] for m in messages]
    assert messages[-1] is ends[0]
    if ends[0].error_message:
        check_error(ends[0].error_message)


def check_error(text: str) -> None:
    """It says something, and if it is ours it is no mistake of ours."""
    assert len(text) > 10, text
    assert "Traceback" not in text, text
    for code in ERROR_CODES:
        if text.startswith(f"{code}: ") or f"] {code}: " in text[:60]:
            assert code in ACCEPTABLE or "unauthenticated: control.key" in text, text


def check_http(url: str, path: str, body: bytes) -> None:
    """A status, and a body that can be read: results, and an error at most once and last."""
    connection = http.client.HTTPConnection(url, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    finally:
        connection.close()
    assert response.status in (200, 400, 500), (response.status, text)
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line]  # U+0085 may be in a string
    parts = [json.loads(line) for line in lines]
    assert parts, "an empty answer"
    errors = [part["error"] for part in parts if "error" in part]
    assert len(errors) <= 1, text
    assert not errors or "error" in parts[-1], text
    assert errors or response.status == 200, text
    for error in errors:
        check_error(error)


def open_stub(url: str) -> tuple[grpc.Channel, service_pb2_grpc.GRPCInferenceServiceStub]:
    channel = grpc.insecure_channel(url)
    return channel, service_pb2_grpc.GRPCInferenceServiceStub(channel)
