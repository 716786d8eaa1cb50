"""`planner watch --apply` beside a real server: the load's mix turns, and an instance with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from serving import HEARTBEAT_S, Deployment, deployed
from under_load import assert_no_loss, loaded, placement_file, roles, wait_for

from distserve.core.model_config import ModelConfig
from distserve_planner.cli import main
from distserve_planner.coefficients import DecodePiece, Degree, PrefillPiece
from distserve_planner.placement_file import read_placement
from distserve_planner.profile_file import Profile
from distserve_tools import die_with_parent
from model_zoo import Zoo

RATE_RPS, WINDOW_S = 8.0, 3.0
PREFILL_HEAVY, DECODE_HEAVY = (120, 4), (16, 30)  # tokens in, tokens out
THREE = ({"role": "prefill"}, {"role": "prefill"}, {"role": "decode"})


def profile_of(folder: Path) -> Profile:
    """A device of which one decodes 150 tokens/s: too few for 8 x 30, where two are enough."""
    degree = Degree(1, (PrefillPiece(2e-3, 0.5e-3),), (DecodePiece(2e-3, 0.0, per_request_s=1 / 150),))
    return Profile("a cpu core", str(folder), ModelConfig.load(folder), "fp32", (degree,), lm_tokens=128)


def words(running: Deployment, folder: Path) -> list[str]:
    """Of `planner watch`; what `deployed` wrote is below `folder`."""
    path = folder / "profile.yaml"
    profile_of(running.model.folder).save(path)
    case = ["--model", str(running.model.folder), "--device", str(path), "--devices-per-node", "3"]
    case += ["--device-memory-gib", "1", "--workload", "humaneval", "--ttft", "1", "--tpot", "0.1"]
    case += ["--families", "high", "--fixed-devices", "--window-s", str(WINDOW_S), "--jobs", "1"]
    case += ["--load-s", "3", "--drain-s", "1", "--log", str(folder / "requests.jsonl")]
    case += ["--placement", str(folder / "placement.yaml"), "--advice", str(folder / "advice")]
    server = ["--grpc", running.server.grpc_url, "--model-repository", str(folder / "repository")]
    return [*case, "--apply", *server]


@contextmanager
def watching(arguments: list[str], log_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    guard = [sys.executable, die_with_parent.__file__, str(os.getpid())]
    command = [*guard, sys.executable, "-m", "distserve_planner", "watch", *arguments]
    with log_path.open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield process
        finally:
            process.terminate()


def test_an_instance_is_turned_over_with_the_mix(
    zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, placement = tmp_path / "requests.jsonl", tmp_path / "placement.yaml"
    settings = {"heartbeat_s": HEARTBEAT_S, "request_log": str(log), "request_log_bytes": 10_000}
    told = tmp_path / "watch.log"
    with deployed(tmp_path, zoo("llama"), THREE, orchestrator=settings) as running:
        placement_file(placement, running, THREE, orchestrator=settings)
        arguments = words(running, tmp_path)
        with (
            loaded(running, rate_rps=RATE_RPS, mix=PREFILL_HEAVY) as load,
            watching(arguments, told) as watch,
        ):
            wait_for(load, int(3 * WINDOW_S * RATE_RPS))  # the reference
            assert Counter(roles(running).values()) == {"prefill": 2, "decode": 1}
            load.mix = DECODE_HEAVY
            deadline = time.monotonic() + 120
            while Counter(i.role for i in read_placement(placement).placement.instances)["decode"] < 2:
                assert watch.poll() is None, told.read_text()
                assert time.monotonic() < deadline, told.read_text()
                time.sleep(0.2)
            # one watch at a time may change a server
            assert main(["watch", *arguments]) == 2
            assert f"is being watched by process {watch.pid}" in capsys.readouterr().err
            wait_for(load, 16)
            assert Counter(roles(running).values()) == {"prefill": 1, "decode": 2}
        assert_no_loss(running, load)
    assert set(read_placement(placement).placement.names) >= {"prefill_0", "decode_0"}
    assert "attainment is below 90 %" in told.read_text()
    assert (tmp_path / "requests.jsonl.2").exists()  # the watch has followed the log over several files
    assert (tmp_path / "advice.html").exists()
