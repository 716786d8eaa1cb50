"""A disaggregated server of the tiny model that scenarios may break, with its supervisor."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from distserve_planner.generate import generate
from distserve_planner.placement_file import parse_placement
from distserve_tools.chaos.model import TINY, ModelSize, TinyModel, tiny_model
from distserve_tools.client import Client
from distserve_tools.launch import ServerOptions, TritonServer
from distserve_tools.processes import ProcessId, descendants
from distserve_tools.readiness import probe, wait_until_serving
from distserve_tools.supervise import Supervisor, stubs_by_model

BLOCK_SIZE = 16
BLOCKS = 1024
HEARTBEAT_S = 0.2  # loads are told this often, so it bounds how soon the end of a leak is seen


@dataclass(frozen=True)
class Setting:
    """What a scenario is run on: instances and orchestrator as in a placement file, and a model."""

    instances: Sequence[Mapping[str, Any]]
    orchestrator: Mapping[str, Any] = field(default_factory=dict)
    size: ModelSize = TINY


TWO_OF_EACH = Setting(({"role": "prefill"}, {"role": "prefill"}, {"role": "decode"}, {"role": "decode"}))
PARALLEL = Setting(({"role": "prefill"}, {"role": "decode", "tp": 2}, {"role": "decode"}))


@dataclass(frozen=True)
class Deployment:
    """A running server with everything that a scenario needs to know of it."""

    server: TritonServer
    client: Client
    supervisor: Supervisor
    model: TinyModel
    events: list[str]  # what the supervisor said
    boot_blocks: Mapping[str, int]  # free blocks of each instance before the first request
    boot_tasks: int  # tasks of the orchestrator's event loop when idle

    def status(self, timeout_s: float = 5.0) -> dict[str, Any]:
        return self.client.control("status", timeout_s)

    def stub(self, model: str) -> ProcessId:
        """The stub process of a Triton model. Raises `LookupError`."""
        for found in stubs_by_model(self.server.pid).get(model, ()):
            return found
        raise LookupError(f"{model} has no stub process")

    def engine(self, instance: str) -> ProcessId:
        """The engine process of an instance. Raises `LookupError`."""
        return self._below(instance, "distserve.engine")

    def rank(self, instance: str) -> ProcessId:
        """A worker process of a further rank, a child of the engine. Raises `LookupError`."""
        engine = self.engine(instance)
        for child in descendants(engine.pid):
            if "distserve" in command_line(child.pid):
                return child
        raise LookupError(f"{instance} has no worker process")

    def processes(self) -> dict[str, ProcessId]:
        """The server, its stubs and engines by a name for people; those that live now."""
        found = {"tritonserver": ProcessId(self.server.pid, 0)}
        for model, stubs in stubs_by_model(self.server.pid).items():
            for stub in stubs:
                found[f"{model} stub"] = stub
                for child in descendants(stub.pid):
                    if "distserve.engine" in command_line(child.pid):
                        found[f"{model} engine"] = child
        return found

    def _below(self, model: str, word: str) -> ProcessId:
        for child in descendants(self.stub(model).pid):
            if word in command_line(child.pid):
                return child
        raise LookupError(f"{model} has no process of {word}")


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def write_repository(folder: Path, model: TinyModel, setting: Setting) -> Path:
    """The model repository of a setting on this machine's cores."""
    cores = sorted(os.sched_getaffinity(0))
    listed = []
    for index, instance in enumerate(setting.instances):
        ranks = instance.get("tp", 1) * instance.get("pp", 1)
        devices = [f"cpu:{cores[(index + rank) % len(cores)]}" for rank in range(ranks)]
        listed.append({"devices": devices, "num_blocks": BLOCKS, "heartbeat_s": HEARTBEAT_S, **instance})
    placement = {
        "schema": "placement/1",
        "model": str(model.folder),
        "block_size": BLOCK_SIZE,
        "oversubscribe": True,
        "orchestrator": {"heartbeat_s": HEARTBEAT_S, **setting.orchestrator},
        "instances": listed,
    }
    generate(parse_placement(yaml.safe_dump(placement)), folder)
    return folder


@contextmanager
def deployed(folder: Path, setting: Setting = TWO_OF_EACH) -> Iterator[Deployment]:
    """Serves a setting from files below `folder`, watched by a supervisor, until the block ends."""
    model = tiny_model(folder / "model", setting.size)
    repository = write_repository(folder / "repository", model, setting)
    options = ServerOptions(
        repository, log_path=folder / "tritonserver.log", drain_timeout_s=5.0, start_timeout_s=120.0
    )
    with TritonServer(options) as server, Client(server.grpc_url, access=server.access) as client:
        status = wait_until_serving(client, 60.0)
        boot = {entry["instance"]: int(entry["blocks_free"]) for entry in status["instances"]}
        probe(client)
        events: list[str] = []

        def greet(loaded: str) -> None:
            # a new orchestrator polls its instances from its first request on
            client.control("status")

        supervisor = Supervisor(server, events.append, greet)
        supervisor.start()
        try:
            tasks = int(client.control("status")["tasks"])
            yield Deployment(server, client, supervisor, model, events, boot, tasks)
        finally:
            supervisor.stop()


@dataclass
class Pauses:
    """Stops and continues processes at random moments, in a thread of its own: all they do becomes slow."""

    processes: Sequence[ProcessId]
    seed: int
    stopped_s: float = 0.03
    running_s: float = 0.05

    def __enter__(self) -> Pauses:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pauses", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        rng = random.Random(self.seed)
        while not self._end.wait(rng.uniform(0, 2 * self.running_s)):
            chosen = rng.choice(self.processes)
            if send_signal(chosen, signal.SIGSTOP):
                self._end.wait(rng.uniform(0, 2 * self.stopped_s))
                send_signal(chosen, signal.SIGCONT)


def send_signal(process: ProcessId, number: int) -> bool:
    """Whether it was alive to get it."""
    if not process.alive():
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True
