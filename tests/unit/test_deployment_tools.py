"""What runs in a deployment's containers: health checks, the echoed log, nodes that come and go."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from distserve.serving.access import Access
from distserve.serving.orchestrator_config import InstanceSpec
from distserve_planner.generate import generate
from distserve_planner.placement_file import parse_placement
from distserve_tools import enlistment, health
from distserve_tools.client import RequestError
from distserve_tools.log_echo import _KEPT_BYTES, LogEcho
from distserve_tools.repository import node_repository

Answer = tuple[int, Any]


@contextlib.contextmanager
def answering(answers: dict[str, Answer]) -> Iterator[str]:
    """An HTTP server that gives each path its status and JSON; 404 otherwise."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            code, body = answers.get(self.path, (404, {"error": "unknown"}))
            data = b"" if body is None else json.dumps(body).encode()
            self.send_response(code)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(5.0)
        server.server_close()


def status(ready: bool) -> Answer:
    decode = {"instance": "decode_0", "usable": ready, "reason": "no answer"}
    text = json.dumps({"ready": ready, "instances": [{"instance": "prefill_0", "usable": True}, decode]})
    return 200, {"control_output": text}


TRITON: dict[str, Answer] = {"/v2/health/ready": (200, None)}
ORCHESTRATOR: dict[str, Answer] = {**TRITON, "/v2/models/orchestrator": (200, {"name": "orchestrator"})}
GENERATE = "/v2/models/orchestrator/generate"


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ({"/v2/health/ready": (400, None)}, "Triton is not ready"),
        (TRITON, None),
        ({**ORCHESTRATOR, GENERATE: status(True)}, None),
        ({**ORCHESTRATOR, GENERATE: status(False)}, "not ready; decode_0: no answer"),
        ({**ORCHESTRATOR, GENERATE: (400, {"error": "stub died"})}, "the orchestrator answers stub died"),
    ],
)
def test_health_is_the_orchestrators_where_there_is_one(
    answers: dict[str, Answer], problem: str | None
) -> None:
    with answering(answers) as url:
        found = health.server_problem(url, 5.0)
    assert found is None if problem is None else found is not None and problem in found


def test_health_of_a_front_end_and_of_nothing() -> None:
    with answering({"/health": (503, {"ready": False, "reason": "too slow"})}) as url:
        assert health.front_end_problem(url, 5.0) == f"{url}: too slow"
    assert "refused" in str(health.front_end_problem(url, 1.0))
    assert "refused" in str(health.server_problem(url, 1.0))
    with answering({"/health": (200, {"ready": True})}) as url:
        assert health.front_end_problem(url, 5.0) is None


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_log_is_echoed_to_its_end_and_kept_small(tmp_path: Path) -> None:
    path, out = tmp_path / "log", io.BytesIO()
    with LogEcho(path, out):
        path.write_bytes(b"")
        with path.open("ab") as log:
            log.write(b"first\n")
            log.flush()
            assert eventually(lambda: out.getvalue() == b"first\n")
            log.write(b"x" * _KEPT_BYTES)
            log.flush()
            assert eventually(lambda: path.stat().st_size == 0)
            log.write(b"last\n")
    assert out.getvalue() == b"first\n" + b"x" * _KEPT_BYTES + b"last\n"
    assert path.read_bytes() == b"last\n"


class Orchestrator:
    """Records operations; refuses them while it is down. Drained after the second look."""

    def __init__(self, down: int = 0) -> None:
        self.calls: list[tuple[str, str]] = []
        self.down, self.looks = down, 0

    def control(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        if self.down > 0:
            self.down -= 1
            raise RequestError("UNAVAILABLE", "nobody")
        if op == "attach":
            self.calls.append((op, arguments["instance"]["name"]))
        elif op == "drain":
            self.calls.append((op, arguments["instance"]))
        else:
            self.looks += 1
        entry = {"instance": "decode_0", "drained": self.looks > 1}
        return {"instances": [entry, {"instance": "decode_9", "drained": False}]}

    def __exit__(self, *error: object) -> None:
        self.calls.append(("close", ""))


@pytest.fixture
def enlist(monkeypatch: pytest.MonkeyPatch) -> Callable[[Orchestrator], tuple[Any, list[str]]]:
    def make(orchestrator: Orchestrator) -> tuple[Any, list[str]]:
        monkeypatch.setattr(enlistment, "Client", lambda address, access: orchestrator)
        monkeypatch.setattr(enlistment, "_AGAIN_S", 0.01)
        monkeypatch.setattr(enlistment, "_LOOK_S", 0.01)
        lines: list[str] = []
        spec = InstanceSpec("decode_0", "decode", "10.0.0.2:8001")
        return enlistment.Enlistment("10.0.0.1:8001", [spec], Access.made(), lines.append), lines

    return make


def test_a_node_asks_until_it_is_attached_and_leaves_drained(
    enlist: Callable[[Orchestrator], tuple[Any, list[str]]],
) -> None:
    orchestrator = Orchestrator(down=3)
    node, lines = enlist(orchestrator)
    node.start()
    assert eventually(lambda: len(lines) == 2)
    assert "asking again" in lines[0]
    assert lines[1].startswith("decode_0: attached")
    assert node.leave(5.0)
    assert orchestrator.calls == [("attach", "decode_0"), ("drain", "decode_0"), ("close", "")]
    assert orchestrator.looks == 2


def test_leaving_waits_no_longer_than_asked_and_fails_for_no_reason(
    enlist: Callable[[Orchestrator], tuple[Any, list[str]]],
) -> None:
    busy = Orchestrator()
    busy.looks = -(10**9)
    node, lines = enlist(busy)
    node.start()
    assert not node.leave(0.1)
    assert "decode_0: still has requests" in lines[-1]
    gone = Orchestrator(down=10**9)
    node, lines = enlist(gone)
    node.start()
    assert not node.leave(0.1)
    assert "leaving without it" in lines[-1]


def test_a_node_finds_its_orchestrator_and_its_own_instances(tmp_path: Path) -> None:
    placement: dict[str, Any] = {
        "schema": "placement/1",
        "model": "m",
        "transfer_secret_file": "/s",
        "nodes": [
            {"name": "a", "host": "10.0.0.1", "grpc_port": 8001},
            {"name": "b", "host": "10.0.0.2", "grpc_port": 8001},
            {"name": "c", "host": "10.0.0.3", "grpc_port": 8001},
        ],
        "instances": [
            {"role": "prefill", "node": "a", "devices": ["cuda:0"]},
            {"role": "decode", "node": "b", "devices": ["cuda:0"]},
            {"role": "decode", "node": "c", "devices": ["cuda:0"]},
        ],
    }
    generate(parse_placement(yaml.safe_dump(placement)), tmp_path / "r", machine_check=False)
    node = node_repository(tmp_path / "r", "c")
    assert node.orchestrator == "10.0.0.1:8001"
    assert [(i.name, i.address) for i in node.instances] == [("decode_1", "10.0.0.3:8001")]
    assert node_repository(tmp_path / "r", "a").orchestrator is None
    del placement["nodes"][0]["grpc_port"]  # nobody can call it
    generate(parse_placement(yaml.safe_dump(placement)), tmp_path / "r", machine_check=False)
    assert node_repository(tmp_path / "r", "c").orchestrator is None
