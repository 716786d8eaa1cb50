"""Instances of several ranks under a real tritonserver: right tokens, and the death of a rank."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serving import BLOCK_SIZE, Deployment, deployed, greedy_mismatches

from distserve_planner.placement_file import parse_placement
from distserve_planner.render import render
from model_zoo import Zoo, prompt

GREEDY = {"temperature": 0.0, "ignore_eos": True}
LENGTHS = [k * BLOCK_SIZE + d for k in (1, 2, 5) for d in (-1, 0, 1)]


def answers_are_right(deployment: Deployment, count: int) -> None:
    prompts = [prompt(LENGTHS[i % len(LENGTHS)], seed=i) for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        calls = [pool.submit(deployment.client.complete, ids, max_tokens=20, **GREEDY) for ids in prompts]
        answers = [call.result() for call in calls]
    for ids, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == 20
        assert greedy_mismatches(deployment.model, ids, answer.token_ids) == []


def instance(deployment: Deployment, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(e for e in deployment.status()["instances"] if e["instance"] == name)
    return found


def engine_pid(log: str, name: str) -> int:
    """The process that the server's log says is ready."""
    (pid, *_) = re.findall(rf"engine of {name} \(\w+\) is ready, process (\d+)", log)
    return int(pid)


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def test_two_way_tensor_parallel_prefill_and_two_stage_decode(zoo: Zoo, tmp_path: Path) -> None:
    instances = ({"role": "prefill", "tp": 2}, {"role": "decode", "pp": 2})
    with deployed(tmp_path, zoo("llama"), instances) as deployment:
        answers_are_right(deployment, 1)
        answers_are_right(deployment, 16)
        deployment.wait_idle()

        epoch = instance(deployment, "decode_0")["epoch"]
        (rank,) = children(engine_pid((tmp_path / "tritonserver.log").read_text(), "decode_0"))
        os.kill(rank, signal.SIGKILL)
        until = time.monotonic() + 60
        while instance(deployment, "decode_0")["epoch"] in (epoch, None):
            assert time.monotonic() < until
            time.sleep(0.1)
        answers_are_right(deployment, 4)
        deployment.wait_idle()


PLACEMENT = """
schema: placement/1
model: cache:any
dtype: bf16
instances:
  - {role: prefill, tp: 2, devices: [cuda:0, cuda:1]}
  - {role: decode, tp: 2, pp: 2, devices: [cuda:2, cuda:3, cuda:4, cuda:5]}
  - {role: unified, tp: 2, devices: [cpu:0-1, cpu:2-3]}
"""


def test_instances_on_several_devices_are_one_model_instance_each() -> None:
    files = render(parse_placement(PLACEMENT).placement)
    for name, devices in (("prefill_0", "cuda:0,cuda:1"), ("decode_0", "cuda:2,cuda:3,cuda:4,cuda:5")):
        config = files[f"{name}/config.pbtxt"]
        assert "kind: KIND_MODEL" in config
        assert "gpus" not in config
        assert f'string_value: "{devices}"' in config
    cores = files["unified_0/config.pbtxt"]
    assert "kind: KIND_CPU" in cores
    assert r"\"devices\":[\"cpu:0-1\",\"cpu:2-3\"]" in cores
