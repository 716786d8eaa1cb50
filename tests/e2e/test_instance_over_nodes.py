"""Instances over two nodes: two servers on two loopback addresses, stage 0 of prefill and of decode on one,
stage 1 on the other. Tokens, the death of a rank and of a node, and nodes that start in any order.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from node_process import NodeProcess, until, usable
from serving import BLOCK_SIZE, greedy_mismatches

from distserve_planner.generate import generate
from distserve_planner.placement_file import parse_placement
from distserve_tools.client import Client, Completion, RequestError
from distserve_tools.processes import free_ports
from model_zoo import Zoo, ZooModel, prompt

HOSTS = {"a": "127.0.0.1", "b": "127.0.0.2"}
LENGTHS = [k * BLOCK_SIZE + d for k in (1, 2, 5) for d in (-1, 0, 1)]
OUTPUT = 20
BACK_S = 90.0


def write_pair(folder: Path, model: ZooModel) -> tuple[Path, str]:
    """The repositories of a pair whose stages are on nodes a and b, and the gRPC address of a."""
    core = f"cpu:{min(os.sched_getaffinity(0))}"
    secret = folder / "secret"
    secret.write_text(secrets.token_hex(32))
    ports = {name: free_ports(1, host)[0] for name, host in HOSTS.items()}
    placement = {
        "schema": "placement/1",
        "model": str(model.folder),
        "oversubscribe": True,
        "transfer_secret_file": str(secret),
        "orchestrator": {"heartbeat_s": 0.2},
        "nodes": [{"name": n, "host": host, "grpc_port": ports[n]} for n, host in HOSTS.items()],
        "instances": [
            {"role": role, "pp": 2, "nodes": ["a", "b"], "devices": [core, core], "num_blocks": 256}
            | {"heartbeat_s": 0.2}
            for role in ("prefill", "decode")
        ],
    }
    generate(parse_placement(yaml.safe_dump(placement)), folder / "repository")
    return folder / "repository", f"{HOSTS['a']}:{ports['a']}"


@dataclass
class Pair:
    model: ZooModel
    repository: Path
    folder: Path
    nodes: dict[str, NodeProcess]
    client: Client

    def start(self, name: str) -> None:
        self.nodes[name] = NodeProcess(self.repository, name, self.folder)

    def usable(self) -> dict[str, Any]:
        return until(lambda: usable(self.client), BACK_S, list(self.nodes.values()))

    def again(self, before: dict[str, Any]) -> None:
        """Both instances are there with other epochs than before."""

        def back() -> bool:
            now = usable(self.client)
            return now is not None and all(now[name]["epoch"] != before[name]["epoch"] for name in before)

        until(back, BACK_S, list(self.nodes.values()))

    def answers_are_right(self, count: int) -> None:
        prompts = [prompt(LENGTHS[i % len(LENGTHS)], seed=i) for i in range(count)]
        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(self.complete, prompts))
        for ids, answer in zip(prompts, answers, strict=True):
            assert len(answer.token_ids) == OUTPUT
            assert greedy_mismatches(self.model, ids, answer.token_ids) == []
            assert answer.stage_times["transfer_s"] > 0

    def complete(self, ids: list[int], max_tokens: int = OUTPUT) -> Completion:
        return self.client.complete(ids, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    def outcome(self, ids: list[int], max_tokens: int) -> Completion | RequestError:
        try:
            return self.complete(ids, max_tokens)
        except RequestError as error:
            return error

    def rank(self, instance: str) -> int:
        """The process of the instance's rank 1, which the node b has."""
        (found,) = [
            p.pid
            for stub in self.nodes["b"].processes(f"/{instance}_ranks/")
            for p in self.nodes["b"].processes("distserve.worker.rank")
            if _parent(p.pid) == stub.pid
        ]
        return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def pair(zoo: Zoo, tmp_path: Path) -> Iterator[Pair]:
    """Node a alone at first."""
    model = zoo("llama")
    repository, address = write_pair(tmp_path, model)
    with ExitStack() as stack:
        pair = Pair(model, repository, tmp_path, {}, stack.enter_context(Client(address)))
        stack.callback(lambda: [node.stop() for node in pair.nodes.values()])
        pair.start("a")
        yield pair


def test_stages_on_two_nodes(pair: Pair) -> None:
    a = pair.nodes["a"]
    until(lambda: "waits for ranks [1]" in a.log, BACK_S, [a])  # it is up without the other
    pair.start("b")
    first = pair.usable()
    pair.answers_are_right(1)
    pair.answers_are_right(16)

    with ThreadPoolExecutor(1) as pool:  # a rank of decode dies below a request
        running = pool.submit(pair.outcome, prompt(20), 200)
        until(lambda: pair.client.control("status")["instances"][1]["running"], BACK_S, [a])
        os.kill(pair.rank("decode_0"), 9)
        ended = running.result(60.0)
    if isinstance(ended, Completion):
        assert greedy_mismatches(pair.model, prompt(20), ended.token_ids) == []
        assert ended.stage_times["recoveries"] > 0
    else:
        assert ended.code == "UNAVAILABLE"
    pair.again({"decode_0": first["decode_0"]})
    pair.answers_are_right(4)


@pytest.mark.slow
def test_a_node_dies_and_comes_back(pair: Pair) -> None:
    pair.start("b")
    before = pair.usable()
    pair.answers_are_right(1)
    pair.nodes["b"].kill()
    began = time.monotonic()
    failed = pair.outcome(prompt(20), 20)  # no instance is whole: one clear error, soon
    assert isinstance(failed, RequestError)
    assert failed.code == "UNAVAILABLE"
    assert time.monotonic() - began < 150
    pair.start("b")
    pair.again(before)
    pair.answers_are_right(4)
