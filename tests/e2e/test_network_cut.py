"""Two hosts on a link of their own, which is cut: see `network_scenario`."""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import network_scenario
import pytest
import yaml
from namespaces import A, B, in_a_namespace, why_not

from distserve_planner.generate import generate
from distserve_planner.placement_file import parse_placement
from model_zoo import Zoo, ZooModel, make_checkpoint, prompt

GRPC_PORT = 8001
PROMPT = 150  # 230 KB of KV
OUTPUT = 600  # more than come before a cut
RATE = "1mbit"


PAIR = [{"role": "prefill"}, {"role": "decode", "node": "b"}]


def scenario(
    folder: Path, model: ZooModel, instances: list[dict[str, Any]], continues: bool, *cuts: str
) -> str:
    """Runs it; returns what it said."""
    core = f"cpu:{min(os.sched_getaffinity(0))}"
    (folder / "secret").write_text(secrets.token_hex(32))
    ours = {"num_blocks": 64, "heartbeat_s": 0.2, "transfer_timeout_s": 5.0}
    placement = {
        "schema": "placement/1",
        "model": str(model.folder),
        "oversubscribe": True,
        "transfer_secret_file": str(folder / "secret"),
        "orchestrator": {"heartbeat_s": 0.2, "prefill_may_decode": continues},
        "nodes": [{"name": n, "host": h, "grpc_port": GRPC_PORT} for n, h in (("a", A), ("b", B))],
        "instances": [{**ours, "devices": [core] * i.get("pp", 1), **i} for i in instances],
    }
    generate(parse_placement(yaml.safe_dump(placement)), folder / "repository")
    ids = prompt(PROMPT)
    expected = model.greedy(ids, OUTPUT if "decode" in cuts else 16)
    spec = {"rate": RATE, "grpc_port": GRPC_PORT, "prompt": ids, "expected": expected}
    spec |= {"continues": continues, "cuts": cuts}
    (folder / "scenario.json").write_text(json.dumps(spec))
    done = in_a_namespace([sys.executable, network_scenario.__file__, str(folder)], 280.0)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    print(done.stdout)  # with -rP: what each cut did
    return done.stdout


def long_model(folder: Path) -> ZooModel:
    """With room for an answer that takes a while."""
    return make_checkpoint(folder / "model", "llama", overrides={"max_position_embeddings": 1024})


@pytest.fixture(autouse=True)
def namespaces() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


def test_prefill_on_one_host_and_decode_on_the_other(zoo: Zoo, tmp_path: Path) -> None:
    """Prefill goes on alone once the handle can't be taken over."""
    assert scenario(tmp_path, zoo("llama"), PAIR, True, "transfer").count("continued") == 1


@pytest.mark.slow
def test_a_decode_host_is_cut_off(tmp_path: Path) -> None:
    said = scenario(tmp_path, long_model(tmp_path), PAIR, True, "decode", "transfer")
    assert said.count("continued") == 2


@pytest.mark.slow
def test_both_instances_over_both_hosts(tmp_path: Path) -> None:
    """Stages on different hosts, and every stage's KV goes to the other host."""
    over = [
        {"role": "prefill", "pp": 2, "nodes": ["a", "b"]},
        {"role": "decode", "pp": 2, "nodes": ["b", "a"]},
    ]
    said = scenario(tmp_path, long_model(tmp_path), over, False, "transfer", "decode")
    assert said.count("back after") == 2
