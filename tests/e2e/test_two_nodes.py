"""Prefill on one node, decode on another: two servers on two loopback addresses, gRPC and KV between them."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from pathlib import Path

import yaml
from serving import BLOCKS, greedy_mismatches

from distserve_planner.generate import generate
from distserve_planner.placement_file import parse_placement
from distserve_tools.client import Client
from distserve_tools.launch import ServerOptions, TritonServer
from distserve_tools.processes import free_ports
from distserve_tools.readiness import wait_until_serving
from distserve_tools.repository import node_repository
from model_zoo import Zoo, prompt


def test_prefill_here_and_decode_there(zoo: Zoo, tmp_path: Path) -> None:
    model = zoo("llama")
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(32))
    secret.chmod(0o600)
    core = f"cpu:{min(os.sched_getaffinity(0))}"
    placement = {
        "schema": "placement/1",
        "model": str(model.folder),
        "transfer_secret_file": str(secret),
        "nodes": [
            {"name": "a", "host": "127.0.0.1"},
            {"name": "b", "host": "127.0.0.2", "grpc_port": free_ports(1, "127.0.0.2")[0]},
        ],
        "instances": [
            {"role": "prefill", "node": "a", "devices": [core], "num_blocks": BLOCKS},
            {"role": "decode", "node": "b", "devices": [core], "num_blocks": BLOCKS},
        ],
    }
    generate(parse_placement(yaml.safe_dump(placement)), tmp_path / "repository")
    with ExitStack() as stack:
        urls = []
        for name in ("b", "a"):
            node = node_repository(tmp_path / "repository", name)
            options = ServerOptions(
                node.folder, host=node.host or "", grpc_port=node.grpc_port or 0, log_path=tmp_path / name
            )
            urls.append(stack.enter_context(TritonServer(options)).grpc_url)
        client = stack.enter_context(Client(urls[-1]))
        wait_until_serving(client, 60.0)
        for length in (15, 16, 40):
            answer = client.complete(prompt(length), max_tokens=16, temperature=0.0, ignore_eos=True)
            assert len(answer.token_ids) == 16
            assert greedy_mismatches(model, prompt(length), answer.token_ids) == []
            assert answer.stage_times["transfer_s"] > 0
