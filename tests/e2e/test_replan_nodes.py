"""Two servers on two addresses become another placement under load: the phases change places."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from serving import BLOCKS, HEARTBEAT_S, Deployment
from under_load import assert_no_loss, loaded, roles, wait_for

from distserve_planner.generate import generate
from distserve_planner.placement_file import Placement, parse_placement, read_placement
from distserve_planner.render import render
from distserve_tools.cli import main
from distserve_tools.client import Client
from distserve_tools.launch import ServerOptions, TritonServer
from distserve_tools.processes import free_ports
from distserve_tools.readiness import wait_until_serving
from distserve_tools.repository import node_repository
from model_zoo import Zoo


def written(
    path: Path, model: Path, ports: Mapping[str, int], where: Mapping[str, str], **more: object
) -> Path:
    """A placement of one instance per phase; `where`: node of each role."""
    core = f"cpu:{min(os.sched_getaffinity(0))}"
    values = {
        "schema": "placement/1",
        "model": str(model),
        "oversubscribe": True,
        "transfer_secret_file": str(path.parent / "secret"),
        "orchestrator": {"heartbeat_s": HEARTBEAT_S},
        "nodes": [
            {"name": "a", "host": "127.0.0.1", "grpc_port": ports["a"]},
            {"name": "b", "host": "127.0.0.2", "grpc_port": ports["b"]},
        ],
        "instances": [
            {
                "role": role,
                "node": node,
                "devices": [core],
                "num_blocks": BLOCKS,
                "heartbeat_s": HEARTBEAT_S,
                **more,
            }
            for role, node in where.items()
        ],
    }
    path.write_text(yaml.safe_dump(values))
    return path


def files(repository: Path) -> dict[str, str]:
    names = [
        p
        for p in repository.rglob("*")
        if p.is_file() and p.name in ("config.pbtxt", "model.py", "launch.yaml")
    ]
    return {str(p.relative_to(repository)): p.read_text() for p in names}


def placement(path: Path) -> Placement:
    return read_placement(path).placement


@pytest.mark.slow  # half a minute; `test_apply.py` goes through the same steps without servers
def test_phases_change_places_between_two_nodes(
    zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, repository, saved = zoo("llama"), tmp_path / "repository", tmp_path / "saved.yaml"
    (tmp_path / "secret").write_text(secrets.token_hex(32))
    (tmp_path / "secret").chmod(0o600)
    ports = {"a": free_ports(1, "127.0.0.1")[0], "b": free_ports(1, "127.0.0.2")[0]}
    now = written(tmp_path / "now.yaml", model.folder, ports, {"prefill": "a", "decode": "b"})
    generate(parse_placement(now.read_text()), repository)
    with ExitStack() as stack:
        servers = {}
        for name in ("b", "a"):
            node = node_repository(repository, name)
            options = ServerOptions(
                node.folder,
                host=node.host or "",
                grpc_port=ports[name],
                log_path=tmp_path / f"{name}.log",
            )
            servers[name] = stack.enter_context(TritonServer(options))
        client = stack.enter_context(Client(servers["a"].grpc_url))
        wait_until_serving(client, 60.0)
        running = Deployment(servers["a"], client, model, {})
        words = ["--grpc", servers["a"].grpc_url, "--model-repository", str(repository), "--save", str(saved)]

        # a decode instance that does not start, on the other node: both nodes are as before
        broken = written(
            tmp_path / "broken.yaml", model.folder, ports, {"prefill": "b", "decode": "a"},
            attention_backend="none-such",
        )  # fmt: skip
        wanted = written(tmp_path / "wanted.yaml", model.folder, ports, {"prefill": "b", "decode": "a"})
        with loaded(running) as load:
            wait_for(load, 4)
            assert main(["apply", str(broken), *words]) == 1
            assert "everything is as it was before" in capsys.readouterr().err
            assert files(repository) == render(placement(now))
            wait_for(load, 4)
            assert main(["apply", str(wanted), *words]) == 0
            wait_for(load, 8)
        assert_no_loss(running, load)
        assert sorted(roles(running).values()) == ["decode", "prefill"]
        assert files(repository) == render(placement(saved))
        specs = {e["instance"]: e for e in client.control("status")["instances"]}
        assert set(specs) == set(placement(saved).names)
