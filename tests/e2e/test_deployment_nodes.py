"""The command lines of a generated deployment, run without its containers: two nodes on two addresses."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from distserve_planner.cli import main
from distserve_planner.deployment.settings import REPOSITORY_FOLDER, SECRET_FILE
from distserve_tools import die_with_parent
from distserve_tools.client import Client, Completion
from distserve_tools.health import server_problem
from distserve_tools.processes import free_ports
from distserve_tools.readiness import wait_until_serving
from model_zoo import Zoo, prompt

A, B = "127.0.0.1", "127.0.0.2"
PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002, "openai": 9000}


class Node:
    """`distserve` with the arguments that a script of the deployment gives the container."""

    def __init__(self, folder: Path, name: str, address: str, grpc_port: int, cache: Path) -> None:
        self.name = name
        self.ports = dict(zip(PORTS, free_ports(len(PORTS), address), strict=True)) | {"grpc": grpc_port}
        self.http, self.grpc = f"{address}:{self.ports['http']}", f"{address}:{grpc_port}"
        words = shlex.split((folder / f"run-{name}.sh").read_text().partition("exec ")[2])
        arguments = words[words.index("serve") :]
        for kind, port in PORTS.items():
            option = f"--{kind}-port"
            if option in arguments:
                at = arguments.index(option) + 1
                assert kind == "grpc" or arguments[at] == str(port)
                arguments[at] = str(self.ports[kind])
        arguments = [str(folder / "model_repository") if w == REPOSITORY_FOLDER else w for w in arguments]
        guard = [sys.executable, die_with_parent.__file__, str(os.getpid())]
        self.log_path = folder / f"{name}.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*guard, sys.executable, "-m", "distserve_tools", *arguments],
                env={**os.environ, "DISTSERVE_CACHE": str(cache)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_healthy(self, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while (problem := server_problem(self.http, 5.0)) is not None:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, f"{problem}\n{self.log}"
            time.sleep(0.2)

    def wait_log(self, pattern: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.log):
            assert time.monotonic() < deadline, f"no {pattern!r} in\n{self.log}"
            time.sleep(0.1)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60.0)


@contextmanager
def started(*args: object) -> Iterator[Node]:
    node = Node(*args)  # type: ignore[arg-type]
    try:
        yield node
    finally:
        node.stop()


def write_deployment(folder: Path, cache: Path, model: Path, ports: dict[str, int]) -> None:
    """`planner generate --target docker` for a prefill and a decode instance on a, and one more on b."""
    (cache / "models").mkdir(parents=True)
    (cache / "models/m").symlink_to(model)
    core = f"cpu:{min(os.sched_getaffinity(0))}"
    secret = folder.parent / "secret"
    secret.write_text(secrets.token_hex(32))
    instances = [("prefill", "a"), ("decode", "a"), ("decode", "b")]
    placement = {
        "schema": "placement/1",
        "model": "cache:m",
        "oversubscribe": True,
        "transfer_secret_file": str(secret),
        "orchestrator": {"heartbeat_s": 0.2},
        "nodes": [{"name": n, "host": h, "grpc_port": ports[n]} for n, h in (("a", A), ("b", B))],
        "instances": [
            {"role": role, "node": node, "devices": [core], "num_blocks": 256, "heartbeat_s": 0.2}
            for role, node in instances
        ],
    }
    (folder.parent / "placement.yaml").write_text(yaml.safe_dump(placement))
    arguments = ["-p", str(folder.parent / "placement.yaml"), "-o", str(folder)]
    assert main(["generate", "--target", "docker", "--no-machine-check", *arguments]) == 0
    for path in (folder / "model_repository").rglob("config.pbtxt"):  # what the scripts mount
        path.write_text(path.read_text().replace(SECRET_FILE, str(secret)))


def test_a_node_joins_and_leaves_without_a_lost_request(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = tmp_path / "deployment", tmp_path / "cache"
    monkeypatch.setenv("DISTSERVE_CACHE", str(cache))
    ports = {"a": free_ports(1, A)[0], "b": free_ports(1, B)[0]}
    write_deployment(folder, cache, zoo("llama").folder, ports)
    with started(folder, "b", B, ports["b"], cache) as b:
        b.wait_log("asking again until it answers")  # the orchestrator comes later
        with started(folder, "a", A, ports["a"], cache) as a, Client(a.grpc) as client:
            a.wait_healthy()
            b.wait_healthy()
            wait_until_serving(client, 30.0)
            b.wait_log("decode_1: attached")
            expected = client.complete(prompt(20), max_tokens=64, temperature=0.0, ignore_eos=True)
            answers: list[Completion] = []
            errors: list[Exception] = []
            leaving = threading.Event()

            def load() -> None:
                try:
                    while not leaving.is_set():
                        answers.append(
                            client.complete(prompt(20), max_tokens=64, temperature=0.0, ignore_eos=True)
                        )
                except Exception as error:
                    errors.append(error)

            threads = [threading.Thread(target=load) for _ in range(4)]
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + 60.0
            while len(answers) <= 8 or len({a.stage_times["decode_instance"] for a in answers}) < 2:
                assert time.monotonic() < deadline, errors
                time.sleep(0.05)
            code = b.stop()
            leaving.set()
            for thread in threads:
                thread.join(60.0)
            assert (code, errors) == (0, [])
            assert "still has requests" not in b.log
            assert {a.token_ids for a in answers} == {expected.token_ids}
            assert {a.stage_times["recoveries"] for a in answers} == {0}
            assert {a.stage_times["decode_instance"] for a in answers} == {"decode_0", "decode_1"}
            assert "successfully loaded" in a.log  # tritonserver's own log is echoed
            assert server_problem(a.http, 5.0) is None
