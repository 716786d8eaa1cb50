"""What clients send and get: tensors in, tensors out, one thread per lane, one end per request."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from distserve.serving.chunk import Chunk, Final
from distserve.serving.params import Parameters
from distserve.serving.responses import ResponseBuilder
from distserve.serving.schema import ORCHESTRATOR_INPUTS, ORCHESTRATOR_OUTPUTS, ServingError, TensorSpec
from distserve.serving.triton_tensors import to_python

ALL = frozenset(spec.name for spec in ORCHESTRATOR_OUTPUTS)
DTYPES = {
    "TYPE_STRING": np.object_,
    "TYPE_INT32": np.int32,
    "TYPE_UINT32": np.uint32,
    "TYPE_FP32": np.float32,
}


def spec(name: str) -> TensorSpec:
    return next(spec for spec in ORCHESTRATOR_INPUTS if spec.name == name)


# inputs


def test_tensors_become_plain_values() -> None:
    assert to_python(spec("text_input"), np.array(["Grüße 😀".encode()], dtype=np.object_)) == "Grüße 😀"
    assert to_python(spec("stop"), np.array([b"a", b"b"], dtype=np.object_)) == ["a", "b"]
    assert to_python(spec("input_ids"), np.array([1, 2], dtype=np.int32)) == [1, 2]
    assert to_python(spec("temperature"), np.array([0.9], dtype=np.float32)) == 0.9
    assert to_python(spec("seed"), np.array([2**64 - 1], dtype=np.uint64)) == 2**64 - 1
    assert to_python(spec("stream"), np.array([True])) is True


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("text_input", np.array([b"\xff\xfe"], dtype=np.object_), "text_input: is not valid UTF-8"),
        ("stop", np.array([b"a", b"\xc3"], dtype=np.object_), "stop: is not valid UTF-8"),
        ("max_tokens", np.zeros(2, np.int32), "max_tokens: 2 values"),
        ("stream", np.zeros(0, np.bool_), "stream: 0 values"),
    ],
)
def test_refused_tensors(name: str, array: Any, words: str) -> None:
    with pytest.raises(ServingError, match=words):
        to_python(spec(name), array)


# outputs


def builder(requested: frozenset[str] = ALL, prefix: str = "", **params: Any) -> ResponseBuilder:
    return ResponseBuilder(Parameters(**params), requested, prefix, lambda token: f"<{token}>")


def chunk(
    text: str = "ab", ids: tuple[int, ...] = (1, 2), final: bool = False, logprobs: bool = False
) -> Chunk:
    entries = [{"logprob": -0.5, "top_ids": [9, 1], "top_logprobs": [-0.1, -0.5]} for _ in ids]
    end = Final("stop", 3, 7, {"prefill_s": 0.25}) if final else None
    return Chunk(text, list(ids), entries if logprobs else [], -1.5, 3, end)


def test_a_plain_message_and_the_last_one() -> None:
    make = builder()
    assert {name: value.tolist() for name, value in make.build(chunk()).items()} == {
        "text_output": [b"ab"],
        "output_ids": [1, 2],
    }
    last = make.build(chunk(final=True))
    assert last["finish_reason"].tolist() == [b"stop"]
    assert (last["prompt_tokens"].tolist(), last["completion_tokens"].tolist()) == ([3], [7])
    assert json.loads(last["stage_times"][0]) == {"prefill_s": 0.25}


def test_shapes_and_types_are_those_of_the_configuration() -> None:
    flags = {name: True for name in vars(Parameters()) if name.startswith("return_")}
    outputs = builder(logprobs=2, **flags).build(chunk(final=True, logprobs=True))
    assert set(outputs) == ALL - {"batch_index", "control_output"}
    for output in ORCHESTRATOR_OUTPUTS:
        if output.name in outputs:
            value = outputs[output.name]
            assert value.dtype == DTYPES[output.dtype], output.name
            assert len(value.shape) == len(output.dims), output.name
            assert all(d in (-1, n) for d, n in zip(output.dims, value.shape, strict=True)), output.name


def test_only_requested_outputs_are_made() -> None:
    outputs = builder(frozenset({"text_output", "batch_index"})).build(chunk(final=True))
    assert set(outputs) == {"text_output", "batch_index"}


def test_outputs_of_vllm_backend_wait_for_their_flags() -> None:
    make = builder(return_finish_reason=True, return_num_input_tokens=True, return_num_output_tokens=True)
    outputs = make.build(chunk())
    assert outputs["finish_reason"].tolist() == [b"None"]
    assert outputs["num_input_tokens"].tolist() == [3]
    assert outputs["num_output_tokens"].tolist() == [2]  # of this message
    assert builder(return_logprobs=True).build(chunk())["logprobs"].tolist() == [b"null"]


def test_logprobs_in_the_form_of_vllm() -> None:
    outputs = builder(return_logprobs=True, logprobs=2).build(chunk(ids=(1, 5), logprobs=True))
    first, second = json.loads(outputs["logprobs"][0])
    assert first == {
        "9": {"logprob": -0.1, "rank": 1, "decoded_token": "<9>"},
        "1": {"logprob": -0.5, "rank": 2, "decoded_token": "<1>"},
    }
    assert second["5"] == {"logprob": -0.5, "rank": None, "decoded_token": "<5>"}


def test_the_prompt_stands_before_the_first_text_only() -> None:
    make = builder(prefix="prompt: ")
    assert make.build(chunk())["text_output"].tolist() == [b"prompt: ab"]
    assert make.build(chunk())["text_output"].tolist() == [b"ab"]


# sending


class Sender:
    """Triton's response sender."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.gone = False

    def send(self, response: Any, flags: int = 0) -> None:
        self.gate.wait(5.0)
        self.sent.append((response, flags))

    def is_cancelled(self) -> bool:
        assert not any(flags for _, flags in self.sent), "asked after the final response"
        return self.gone


class TritonErrorDouble(Exception):
    INTERNAL, UNAVAILABLE, INVALID_ARG, NOT_FOUND, CANCELLED = range(5)


@pytest.fixture
def stream_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`client_stream` on a stand-in of the module that exists inside of Triton only."""
    stub: Any = types.ModuleType("triton_python_backend_utils")
    stub.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    stub.TritonError = TritonErrorDouble
    stub.Tensor = lambda name, value: (name, value.tolist())
    stub.InferenceResponse = lambda tensors=None, error=None: error or dict(tensors)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stub)
    name = "distserve.serving.client_stream"
    monkeypatch.delitem(sys.modules, name, raising=False)
    import importlib

    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def test_messages_keep_their_order_and_gather_behind_a_slow_client(stream_module: Any) -> None:
    lanes, sender, ended = stream_module.Lanes(2), Sender(), threading.Event()
    stream = stream_module.ClientStream(sender, lanes.assign(), lambda stream: ended.set())
    stream.build = builder(frozenset({"text_output"})).build
    sender.gate.clear()
    for text in "abcd":
        stream.send(chunk(text, ()))
    stream.send(chunk("e", (), final=True))
    assert stream.cancelled() is False
    sender.gate.set()
    assert ended.wait(5.0)
    texts = [response["text_output"][0] for response, _ in sender.sent]
    assert b"".join(texts) == b"abcde"
    assert len(texts) <= 3
    assert [flags for _, flags in sender.sent] == [0] * (len(texts) - 1) + [1]
    assert stream.cancelled() is False  # without asking Triton
    lanes.close(2.0)


def test_an_error_carries_its_code_and_ends_the_stream(stream_module: Any) -> None:
    lanes, sender, ended = stream_module.Lanes(1), Sender(), threading.Event()
    stream = stream_module.ClientStream(sender, lanes.assign(), lambda stream: ended.set())
    stream.build = builder(frozenset({"text_output"})).build
    stream.send(chunk("a", ()))
    stream.fail(ServingError("RESOURCE_EXHAUSTED", "queue is full"))
    assert ended.wait(5.0)
    lanes.close(2.0)
    error, flags = sender.sent[-1]
    assert error.args == ("RESOURCE_EXHAUSTED: queue is full", TritonErrorDouble.UNAVAILABLE)
    assert flags == 1
    assert len(sender.sent) == 2


def test_a_client_that_is_gone_is_seen(stream_module: Any) -> None:
    lanes, sender = stream_module.Lanes(1), Sender()
    stream = stream_module.ClientStream(sender, lanes.assign(), lambda stream: None)
    assert not stream.cancelled()
    sender.gone = True
    assert stream.cancelled()
    lanes.close(2.0)


def test_a_send_that_fails_does_not_stop_the_lane(stream_module: Any) -> None:
    lanes, broken, sender, ended = stream_module.Lanes(1), Sender(), Sender(), threading.Event()

    def refuse(response: Any, flags: int = 0) -> None:
        raise RuntimeError("closed")

    broken.send = refuse  # type: ignore[method-assign]
    for each, on_end in ((broken, lambda stream: None), (sender, lambda stream: ended.set())):
        stream = stream_module.ClientStream(each, lanes.assign(), on_end)
        stream.fail(ServingError("INTERNAL", "x"))
    assert ended.wait(5.0)
    lanes.close(2.0)
