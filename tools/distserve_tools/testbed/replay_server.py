"""A real tritonserver with the real orchestrator, on load-only instances."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from distserve_planner.generate import generate
from distserve_planner.placement_check import ORCHESTRATOR
from distserve_planner.placement_file import PLACEMENT_SCHEMA, parse_placement
from distserve_tools.client import Client
from distserve_tools.launch import ServerOptions, TritonServer
from distserve_tools.readiness import probe, wait_until_serving
from distserve_tools.testbed.systems import cores

READY_S = 60.0
_STAGE_MODEL = '''"""A load-only instance."""

from distserve_tools.testbed.replay_stage import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def write_replay_repository(folder: Path, model: str, orchestrators: int) -> Path:
    """1 prefill + 1 decode instance as `planner generate` writes them, their model replaced; `orchestrators`
    instances of the orchestrator model."""
    instances = [
        {"role": role, "devices": [f"cpu:{core}"], "num_blocks": 64, "max_batch_size": 4096}
        for role, core in zip(("prefill", "decode"), cores(), strict=True)
    ]
    values = {"schema": PLACEMENT_SCHEMA, "model": model, "instances": instances}
    generate(parse_placement(str(yaml.safe_dump(values))), folder, force=True)
    for stage in folder.glob("*/1/model.py"):
        if stage.parent.parent.name != ORCHESTRATOR:
            stage.write_text(_STAGE_MODEL)
    path = folder / ORCHESTRATOR / "config.pbtxt"
    config: Any = model_config_pb2.ModelConfig()
    text_format.Parse(path.read_text(), config)
    config.instance_group[0].count = orchestrators
    path.write_text(text_format.MessageToString(config))
    return folder


@contextlib.contextmanager
def replay_server(folder: Path, model: str, orchestrators: int) -> Iterator[TritonServer]:
    """Serves it and waits until every orchestrator has been asked once."""
    repository = write_replay_repository(folder, model, orchestrators)
    options = ServerOptions(repository, log_path=folder.parent / f"{folder.name}.log")
    with TritonServer(options) as server, Client(server.grpc_url) as client:
        wait_until_serving(client, READY_S)
        for _ in range(4 * orchestrators):  # Triton chooses the orchestrator
            probe(client)
        yield server
