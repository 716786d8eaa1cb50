"""A whole local deployment: tritonserver, its supervisor, and the OpenAI front end if wanted."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distserve.core.model_config import resolve_model
from distserve.serving.orchestrator_config import OrchestratorConfig
from distserve_tools import die_with_parent
from distserve_tools.client import Client
from distserve_tools.console import StepLines
from distserve_tools.enlistment import Enlistment
from distserve_tools.launch import ServerOptions, TritonServer, http_ok
from distserve_tools.processes import free_ports
from distserve_tools.readiness import NotServingError, probe, wait_until_serving
from distserve_tools.repository import NodeRepository, orchestrator_config
from distserve_tools.supervise import Supervisor

_FIRST_STATUS_S = 120.0
_FRONT_END_S = 60.0


@dataclass(frozen=True)
class Stack:
    """What runs. `client` and `orchestrator` are absent on a node without an orchestrator."""

    server: TritonServer
    supervisor: Supervisor
    client: Client | None
    orchestrator: OrchestratorConfig | None
    openai_url: str | None  # http://host:port

    @property
    def model_name(self) -> str:
        """What the OpenAI front end calls the model."""
        assert self.orchestrator is not None
        return resolve_model(self.orchestrator.model).name


@contextlib.contextmanager
def running(
    options: ServerOptions,
    lines: StepLines,
    openai_port: int | None = None,
    node: NodeRepository | None = None,
) -> Iterator[Stack]:
    """Starts everything, checks that a request gets through, and ends everything afterwards.

    `openai_port`: 0 for any free one, `None` for no front end. `node`: one of several, which tells the
    orchestrator on another that it comes and goes. Raises `ServerStartError`,
    `ServerNotFoundError`, `NotServingError`.
    """
    orchestrator = orchestrator_config(options.repository)
    with contextlib.ExitStack() as stack:
        lines.say(f"starting tritonserver on {options.repository}")
        server = stack.enter_context(TritonServer(options, lines.models))
        client = None
        if orchestrator is not None:
            client = stack.enter_context(Client(server.grpc_url, access=server.access))
            several = node is not None and node.host is not None
            elsewhere = several or any(spec.address for spec in orchestrator.instances)
            wait_s = max(_FIRST_STATUS_S, options.start_timeout_s) if elsewhere else _FIRST_STATUS_S
            status = wait_until_serving(client, wait_s)
            lines.say("; ".join(_line(entry) for entry in status["instances"]))
            probe(client)

        def greet(model: str) -> None:
            # a new orchestrator polls its instances from its first request on
            if client is not None:
                client.control("status")

        supervisor = Supervisor(server, lines.say, greet, load_timeout_s=options.start_timeout_s)
        supervisor.start()
        stack.callback(supervisor.stop)
        if node is not None and node.orchestrator is not None and node.instances:
            enlistment = Enlistment(node.orchestrator, node.instances, server.access, lines.say)
            enlistment.start()
            stack.callback(enlistment.leave, options.drain_timeout_s)
        url = None
        if openai_port is not None and orchestrator is not None:
            url = stack.enter_context(_front_end(server, options, openai_port, orchestrator.model))
        try:
            yield Stack(server, supervisor, client, orchestrator, url)
        finally:
            lines.say("stopping")


@contextlib.contextmanager
def _front_end(server: TritonServer, options: ServerOptions, port: int, model: str) -> Iterator[str]:
    """The OpenAI front end as a process of its own."""
    host, drain_s = options.host, options.drain_timeout_s
    port = port or free_ports(1, host)[0]
    command = [sys.executable, die_with_parent.__file__, str(os.getpid()), sys.executable, "-m"]
    command += ["distserve_tools", "openai", "--model", model, "--grpc", server.grpc_url, "--host", host]
    command += ["--metrics-url", f"http://{server.metrics_url}/metrics", "--port", str(port)]
    command += ["--drain-timeout", str(drain_s)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + _FRONT_END_S
        address = f"127.0.0.1:{port}" if host == "0.0.0.0" else f"{host}:{port}"
        while not http_ok(address, "/health"):
            if process.poll() is not None:
                raise NotServingError(f"the OpenAI front end ended with code {process.returncode}")
            if time.monotonic() > deadline:
                raise NotServingError(f"the OpenAI front end did not answer within {_FRONT_END_S:.0f} s")
            time.sleep(0.1)
        yield f"http://{address}"
    finally:
        process.terminate()
        try:
            process.wait(drain_s + 5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5.0)


def _line(entry: dict[str, Any]) -> str:
    tokens = (entry.get("blocks_total") or 0) * (entry.get("block_size") or 0)
    return f"{entry['instance']}: {entry['role']}, {tokens} tokens of KV"
