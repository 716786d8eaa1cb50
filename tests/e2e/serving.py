"""Starts a real tritonserver on free ports with small random models, for the tests of this folder."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvicorn
import yaml

from distserve_planner.generate import generate
from distserve_planner.placement_file import parse_placement
from distserve_tools.client import Client
from distserve_tools.launch import ServerOptions, TritonServer
from distserve_tools.openai_api.app import FrontEnd, FrontEndConfig
from distserve_tools.openai_api.tokenizer import ChatTokenizer
from distserve_tools.processes import descendants
from distserve_tools.readiness import wait_until_serving
from model_zoo import CONTEXT, ZooModel

BLOCK_SIZE = 16
BLOCKS = 256
HEARTBEAT_S = 0.2  # loads are reported this often, so it bounds how soon `wait_idle` sees them
ONE_OF_EACH = ({"role": "prefill"}, {"role": "decode"})


@dataclass(frozen=True)
class Deployment:
    """A running server, its client, and the model that it serves."""

    server: TritonServer
    client: Client
    model: ZooModel
    boot: Mapping[str, int]  # free blocks of each instance before the first request

    def status(self) -> dict[str, Any]:
        return self.client.control("status")

    def wait_idle(self, timeout_s: float = 15.0) -> None:
        """Fails unless every block comes back and nothing is pending anywhere."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            left = _left_over(status, self.boot)
            if not left:
                return
            assert time.monotonic() < deadline, f"not idle: {left}"
            time.sleep(0.05)


def _left_over(status: Mapping[str, Any], boot: Mapping[str, int]) -> list[str]:
    left = [f"{key}={status[key]}" for key in ("requests", "queued") if status[key]]
    for entry in status["instances"]:
        name = entry["instance"]
        if entry["blocks_free"] != boot[name]:
            left.append(f"{name}: {entry['blocks_free']} of {boot[name]} blocks free")
        for key in ("queued", "running", "leases", "transfers_pending", "requests", "leases_held"):
            if entry[key]:
                left.append(f"{name}: {key}={entry[key]}")
    return left


def write_repository(
    folder: Path, model: ZooModel, instances: Sequence[Mapping[str, Any]] = ONE_OF_EACH, **placement: Any
) -> Path:
    """`planner generate` for `model` on the cores of this machine; `placement` adds top-level keys."""
    cores = sorted(os.sched_getaffinity(0))
    listed = []
    for index, instance in enumerate(instances):
        ranks = instance.get("tp", 1) * instance.get("pp", 1)
        devices = [f"cpu:{cores[(index + rank) % len(cores)]}" for rank in range(ranks)]
        listed.append({"devices": devices, "num_blocks": BLOCKS, "heartbeat_s": HEARTBEAT_S, **instance})
    text = yaml.safe_dump(
        {
            "schema": "placement/1",
            "model": str(model.folder),
            "block_size": BLOCK_SIZE,
            "oversubscribe": True,
            "orchestrator": {"heartbeat_s": HEARTBEAT_S},
            "instances": listed,
            **placement,
        }
    )
    generate(parse_placement(text), folder)
    return folder


@contextmanager
def deployed(
    folder: Path,
    model: ZooModel,
    instances: Sequence[Mapping[str, Any]] = ONE_OF_EACH,
    drain_timeout_s: float = 10.0,
    **placement: Any,
) -> Iterator[Deployment]:
    """Generates a repository below `folder`, serves it, and ends the server afterwards."""
    repository = write_repository(folder / "repository", model, instances, **placement)
    log = folder / "tritonserver.log"
    options = ServerOptions(repository, log_path=log, drain_timeout_s=drain_timeout_s, start_timeout_s=120.0)
    with TritonServer(options) as server, Client(server.grpc_url, access=server.access) as client:
        status = wait_until_serving(client, 60.0)
        boot = {entry["instance"]: entry["blocks_free"] for entry in status["instances"]}
        try:
            yield Deployment(server, client, model, boot)
        except BaseException:
            sys.stderr.write("\n".join(["server log:", *log.read_text().splitlines()[-60:], ""]))
            raise


@contextmanager
def front_end(
    deployment: Deployment, api_key: str | None = None, request_timeout_s: float = 60.0
) -> Iterator[str]:
    """The OpenAI front end of a server, in a thread of this process; its URL."""
    config = FrontEndConfig(
        grpc_url=deployment.server.grpc_url,
        metrics_url=f"http://{deployment.server.metrics_url}/metrics",
        model_name="llama",
        max_context=CONTEXT,
        api_key=api_key,
        request_timeout_s=request_timeout_s,
    )
    app = FrontEnd(config, ChatTokenizer(deployment.model.folder)).app()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def engine_pid(deployment: Deployment, instance: str) -> int:
    """The child of the stub whose arguments have the instance's model folder."""
    for stub in descendants(deployment.server.pid):
        if f"/{instance}/" in _arguments(stub.pid) and "backend_stub" in _arguments(stub.pid):
            return next(c.pid for c in descendants(stub.pid) if "distserve.engine" in _arguments(c.pid))
    raise AssertionError(f"no stub of {instance}")


def _arguments(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@torch.inference_mode()
def greedy_mismatches(model: ZooModel, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Positions in `tokens` where transformers' greedy choice is another by more than rounding.

    One pass over prompt and output; a step counts only if its top-2 logits are at least 1e-4 apart.
    """
    logits = model.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
    best = logits.max(dim=-1).values
    chosen = logits.gather(1, torch.tensor(list(tokens)).unsqueeze(1)).squeeze(1)
    return [i for i, gap in enumerate((best - chosen).tolist()) if gap >= 1e-4]
