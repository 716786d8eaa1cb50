"""Parts of the tools around a server: repositories, status, the client's messages, the demo's placement."""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tritonclient.grpc import service_pb2

from distserve.core.parsing import ConfigError
from distserve_planner.placement_check import check_placement
from distserve_planner.placement_file import parse_placement
from distserve_planner.render import render
from distserve_planner.repository_files import write_repository
from distserve_tools import client, doctor, readiness
from distserve_tools.cli import COMMANDS, main
from distserve_tools.demo_placement import demo_placement
from distserve_tools.repository import node_repository, orchestrator_config
from distserve_tools.status import status_table

TWO_NODES = """\
schema: placement/1
model: m
transfer_secret_file: /etc/secret
nodes:
  - {name: a, host: 10.0.0.1}
  - {name: b, host: 10.0.0.2, grpc_port: 8001}
instances:
  - {role: prefill, node: a, devices: [cuda:0]}
  - {role: decode, node: b, devices: [cuda:0]}
"""


def test_each_node_gets_its_repository(tmp_path: Path) -> None:
    write_repository(tmp_path, render(parse_placement(TWO_NODES).placement))
    node = node_repository(tmp_path, "b")
    assert (node.folder, node.host, node.grpc_port) == (tmp_path / "b", "10.0.0.2", 8001)
    assert orchestrator_config(node.folder) is None
    orchestrator = orchestrator_config(node_repository(tmp_path, "a").folder)
    assert orchestrator is not None
    assert [spec.address for spec in orchestrator.instances] == [None, "10.0.0.2:8001"]
    with pytest.raises(ConfigError, match="choose with --node: a, b"):
        node_repository(tmp_path, None)
    with pytest.raises(ConfigError, match="--node c: not in"):
        node_repository(tmp_path, "c")
    with pytest.raises(ConfigError, match="it is for one node"):
        node_repository(tmp_path / "a", "a")
    with pytest.raises(ConfigError, match="no such folder"):
        node_repository(tmp_path / "nothing", None)


def test_a_node_hosts_ranks_of_an_instance_that_another_serves(tmp_path: Path) -> None:
    decode = "  - {role: decode, node: b, devices: [cuda:0]}\n"
    over = (
        "  - {role: decode, tp: 2, pp: 2, nodes: [a, a, b, b], devices: [cuda:1, cuda:2, cuda:3, cuda:4]}\n"
    )
    text = TWO_NODES.replace(decode, over).replace("host: 10.0.0.1}", "host: 10.0.0.1, grpc_port: 8002}")
    files = render(parse_placement(text).placement)
    assert sorted(name.split("/")[1] for name in files if name.endswith("pbtxt")) == [
        "decode_0",
        "decode_0_ranks",
        "orchestrator",
        "prefill_0",
    ]
    lead, guest = files["a/decode_0/config.pbtxt"], files["b/decode_0_ranks/config.pbtxt"]
    assert 'string_value: "cuda:1,cuda:2"' in lead
    assert r"\"rank_servers\":[\"\",\"\",\"10.0.0.2:8001\",\"10.0.0.2:8001\"]" in lead
    assert 'string_value: "cuda:3,cuda:4"' in guest
    assert r"\"instance\":\"decode_0\",\"ranks\":[2,3]" in guest
    write_repository(tmp_path, files)
    node = node_repository(tmp_path, "b")  # it takes leave from the orchestrator for these instances too
    assert node.orchestrator == "10.0.0.1:8002"
    assert [(spec.name, spec.address) for spec in node.instances] == [("decode_0", None)]


@pytest.mark.parametrize("cores", [{0, 1}, {0, 1, 2, 3}, {0}, {5}, {3, 9}])
def test_the_demo_fits_the_cores_there_are(monkeypatch: pytest.MonkeyPatch, cores: set[int]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    file = demo_placement()
    check_placement(file)
    used = {device for instance in file.placement.instances for device in instance.devices}
    assert used == {f"cpu:{core}" for core in sorted(cores)[:2]}


STATUS: dict[str, Any] = {
    "ready": False,
    "model": "cache:m",
    "requests": 3,
    "queued": 1,
    "queued_tokens": 17,
    "instances": [
        {"instance": "prefill_0", "role": "prefill", "usable": True, "blocks_total": 100, "blocks_free": 75}
        | {"misfit": False, "phase": "up", "reason": ""},
        {"instance": "decode_0", "role": "decode", "usable": False, "phase": "down", "reason": "model [x]"}
        | {"misfit": False},
    ],
}


def test_the_status_table_shows_what_is_wrong() -> None:
    console = Console(file=StringIO(), width=100)
    console.print(status_table(STATUS))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "not ready  cache:m  requests 3  queued 1  queued tokens 17" in text
    assert "25/100" in text
    assert "down model [x]" in text


class FakeClient:
    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    def control(self, op: str, timeout_s: float) -> Any:
        return self._next()

    def complete(self, prompt: Sequence[int], timeout_s: float, **params: Any) -> Any:
        return self._next()

    def _next(self) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_readiness_waits_and_then_names_the_instance() -> None:
    good = {"instances": [{**STATUS["instances"][0]}]}
    refused = client.RequestError("UNAVAILABLE", "starting")
    assert readiness.wait_until_serving(FakeClient([refused, STATUS, good]), 10) == good  # type: ignore[arg-type]
    with pytest.raises(readiness.NotServingError, match=r"decode_0 \(decode\): model \[x\]"):
        readiness.wait_until_serving(FakeClient([STATUS]), 0.1)  # type: ignore[arg-type]
    reached = STATUS["instances"][0]
    wrong = {**STATUS["instances"][1], "misfit": True, "reason": "dtype='bf16': prefill_0 has 'fp32'"}
    early = [{**reached, "phase": "connecting"}, {**wrong, "reason": "dtype='bf16': decode_1 has 'fp32'"}]
    first, told = {"instances": early}, {"instances": [reached, wrong]}
    with pytest.raises(readiness.NotServingError, match=r"decode_0 \(decode\): dtype='bf16': prefill_0"):
        readiness.wait_until_serving(FakeClient([first, told]), 1e9)  # type: ignore[arg-type]
    with pytest.raises(readiness.NotServingError, match="decode_1 has"):  # one is never reached
        readiness.wait_until_serving(FakeClient([first]), 0.1)  # type: ignore[arg-type]
    with pytest.raises(readiness.NotServingError, match="orchestrator: UNAVAILABLE: starting"):
        readiness.wait_until_serving(FakeClient([refused]), 0.1)  # type: ignore[arg-type]


def test_the_first_request_outlives_an_instance_that_is_lost_just_then() -> None:
    lost = client.RequestError("UNAVAILABLE", "no usable decode instance")
    readiness.probe(FakeClient([lost, lost, None]), 10)  # type: ignore[arg-type]
    with pytest.raises(readiness.NotServingError, match="a first request failed: UNAVAILABLE"):
        readiness.probe(FakeClient([lost]), 0.1)  # type: ignore[arg-type]
    wrong = client.RequestError("FAILED_PRECONDITION", "dtype='bf16'")
    with pytest.raises(readiness.NotServingError, match="dtype"):  # at once
        readiness.probe(FakeClient([wrong]), 1e9)  # type: ignore[arg-type]


def response(**tensors: bytes) -> Any:
    message = service_pb2.ModelInferResponse()
    for name, raw in tensors.items():
        message.outputs.append(service_pb2.ModelInferResponse.InferOutputTensor(name=name))
        message.raw_output_contents.append(raw)
    return message


def text(value: str) -> bytes:
    data = value.encode()
    return len(data).to_bytes(4, "little") + data


def test_client_reads_first_and_last_messages() -> None:
    first = client._chunk(response(text_output=text("Ü"), output_ids=b"\x07\0\0\0\x09\0\0\0"))
    assert (first.text, first.token_ids, first.finish_reason) == ("Ü", (7, 9), None)
    last = client._chunk(
        response(
            finish_reason=text("stop"),
            prompt_tokens=b"\x05\0\0\0",
            completion_tokens=b"\x02\0\0\0",
            stage_times=text('{"prefill_s": 0.5}'),
        )
    )
    whole = client.gather(iter([first, last]), first.received_s - 1.0)
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("Ü", (7, 9), "stop")
    assert (whole.prompt_tokens, whole.completion_tokens) == (5, 2)
    assert whole.ttft_s == pytest.approx(1.0)
    assert whole.stage_times == {"prefill_s": 0.5}
    with pytest.raises(client.RequestError, match="without its last message"):
        client.gather(iter([first]), 0.0)


def test_client_finds_the_code_in_an_error() -> None:
    error = client.request_error("in ensemble, INVALID_ARGUMENT: max_tokens=0: must be at least 1")
    assert (error.code, error.message) == ("INVALID_ARGUMENT", "max_tokens=0: must be at least 1")
    assert client.request_error("what").code == "INTERNAL"


def test_doctor_finds_the_wheels_server_and_a_missing_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTSERVE_CACHE", str(tmp_path))
    findings = {finding.subject: finding for finding in doctor.machine_findings()}
    assert findings["tritonserver"].level == "ok", findings["tritonserver"]
    assert findings["python"].level == "ok"
    assert findings["model cache"].level == "warn"
    repository = tmp_path / "repository"
    placement = "schema: placement/1\nmodel: /nowhere\ninstances: [{role: unified, devices: [cpu:0]}]\n"
    write_repository(repository, render(parse_placement(placement).placement))
    assert "no folder /nowhere" in doctor._repository(repository, None).detail
    (repository / "unified_0/1/model.py").unlink()
    assert "unified_0/1/model.py is missing" in doctor._repository(repository, None).detail


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.name.split(), "--help"])
    assert caught.value.code == 0
    assert f"distserve {command.name}" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "code"), [(["bench"], 2), (["bench", "--help"], 0)])
def test_a_group_of_commands_lists_them(
    words: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    told = capsys.readouterr().out
    assert "bench transfer" in told
    assert "chaos" not in told
