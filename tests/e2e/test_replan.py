"""A running server becomes another placement under load: no error, right tokens, or everything as before."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from serving import BLOCK_SIZE, BLOCKS, HEARTBEAT_S, Deployment, deployed, greedy_mismatches

from distserve_planner.placement_file import read_placement
from distserve_planner.render import render
from distserve_tools.apply.lock import exclusive
from distserve_tools.cli import main
from distserve_tools.client import RequestError
from distserve_tools.supervise import Supervisor, stubs_by_model
from model_zoo import Zoo, prompt

GREEDY = {"temperature": 0.0, "ignore_eos": True}
PREFILL_HEAVY = (120, 6)  # tokens in, tokens out
DECODE_HEAVY = (16, 60)
PROMPTS = 3  # distinct ones of each mix: every distinct answer is checked against transformers


@dataclass
class Load:
    """Requests from a few clients in closed loop; `mix` may be changed on the way."""

    mix: tuple[int, int] = PREFILL_HEAVY
    answers: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@contextmanager
def loaded(deployment: Deployment, clients: int = 4) -> Iterator[Load]:
    load, stop = Load(), threading.Event()

    def client(seed: int) -> None:
        while not stop.is_set():
            seed += clients
            length, output = load.mix
            ids = prompt(length, seed=seed % PROMPTS)
            try:
                answer = deployment.client.complete(ids, timeout_s=60, max_tokens=output, **GREEDY)
                load.answers.append((tuple(ids), answer.token_ids))
            except Exception as error:  # every kind of loss counts
                load.errors.append(repr(error))

    threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        stop.set()
        for thread in threads:
            thread.join(90)


def wait_for(load: Load, more: int, timeout_s: float = 60.0) -> None:
    enough, deadline = len(load.answers) + more, time.monotonic() + timeout_s
    while len(load.answers) < enough and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(load.answers) >= enough, load.errors[:3]


def assert_no_loss(deployment: Deployment, load: Load) -> None:
    """No request failed, and all answers to one prompt are the same, greedy one."""
    assert load.errors == []
    distinct = set(load.answers)
    assert len(distinct) == len({ids for ids, _ in distinct})
    for ids, tokens in distinct:
        assert greedy_mismatches(deployment.model, ids, tokens) == []


def placement_file(
    path: Path, deployment: Deployment, instances: Sequence[Mapping[str, Any]], **top: Any
) -> Path:
    cores = sorted(os.sched_getaffinity(0))
    listed = [
        {
            "devices": [f"cpu:{cores[i % len(cores)]}"],
            "num_blocks": BLOCKS,
            "heartbeat_s": HEARTBEAT_S,
            **instance,
        }
        for i, instance in enumerate(instances)
    ]
    values = {
        "schema": "placement/1",
        "model": str(deployment.model.folder),
        "block_size": BLOCK_SIZE,
        "oversubscribe": True,
        "orchestrator": {"heartbeat_s": HEARTBEAT_S},
        "instances": listed,
        **top,
    }
    path.write_text(yaml.safe_dump(values))
    return path


def roles(deployment: Deployment) -> dict[str, str]:
    return {e["instance"]: e["role"] for e in deployment.status()["instances"] if e["usable"]}


def still_down(deployment: Deployment, wanted: Mapping[str, str]) -> bool:
    try:
        return roles(deployment) != wanted
    except RequestError:
        return True


def apply(deployment: Deployment, repository: Path, placement: Path, *words: str) -> int:
    grpc = deployment.server.grpc_url
    return main(["apply", str(placement), "--grpc", grpc, "--model-repository", str(repository), *words])


def files(repository: Path) -> dict[str, str]:
    names = [p for p in repository.rglob("*") if p.is_file() and p.name in ("config.pbtxt", "model.py")]
    return {str(p.relative_to(repository)): p.read_text() for p in names}


TWO_PREFILLS = ({"role": "prefill"}, {"role": "prefill"}, {"role": "decode"})
TWO_DECODES = ({"role": "prefill"}, {"role": "decode"}, {"role": "decode"})


def test_an_instance_turns_from_prefill_to_decode_under_load(zoo: Zoo, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    with deployed(tmp_path, zoo("llama"), TWO_PREFILLS) as running:
        wanted = placement_file(tmp_path / "wanted.yaml", running, TWO_DECODES)
        saved = tmp_path / "placement.yaml"
        with loaded(running) as load:
            wait_for(load, 8)
            load.mix = DECODE_HEAVY  # the mix turns, and the placement with it
            wait_for(load, 4)
            assert apply(running, repository, wanted, "--save", str(saved)) == 0
            assert sorted(roles(running).values()) == ["decode", "decode", "prefill"]
            wait_for(load, 12)
        assert_no_loss(running, load)
        # the files are what is served
        assert files(repository) == render(read_placement(saved).placement)
        assert set(read_placement(saved).placement.names) == set(roles(running))

        # an orchestrator that dies later comes back with the present instances, not with its first ones
        present, events = roles(running), list[str]()
        supervisor = Supervisor(running.server, events.append)
        supervisor.start()
        try:
            (stub,) = stubs_by_model(running.server.pid)["orchestrator"]
            os.kill(stub.pid, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while supervisor.restarts["orchestrator"] == 0 or still_down(running, present):
                assert time.monotonic() < deadline, events
                time.sleep(0.1)
        finally:
            supervisor.stop()

        # to unified instances on the same cores: neither phase goes unserved, and nothing is done twice
        unified = placement_file(tmp_path / "unified.yaml", running, [{"role": "unified"}] * 2)
        with loaded(running) as load:
            wait_for(load, 4)
            assert apply(running, repository, unified) == 0
            wait_for(load, 8)
        assert_no_loss(running, load)
        assert set(roles(running).values()) == {"unified"}
        before = roles(running)
        assert apply(running, repository, unified) == 0
        assert roles(running) == before


def test_a_placement_that_does_not_load_is_rolled_back(
    zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository, saved = tmp_path / "repository", tmp_path / "placement.yaml"
    with deployed(tmp_path, zoo("llama"), TWO_PREFILLS) as running:
        before, served = files(repository), roles(running)
        broken = {"role": "decode", "attention_backend": "none-such"}  # known only once the engine starts
        wanted = placement_file(
            tmp_path / "wanted.yaml", running, [{"role": "prefill"}, {"role": "decode"}, broken]
        )
        with loaded(running) as load:
            wait_for(load, 4)
            assert apply(running, repository, wanted, "--save", str(saved)) == 1
            wait_for(load, 8)
        assert_no_loss(running, load)
        assert roles(running) == served
        assert files(repository) == before
        assert not saved.exists()
        assert "everything is as it was before" in capsys.readouterr().err

        with exclusive(repository):  # another watcher is at it
            assert apply(running, repository, wanted) == 1
        assert "is being changed by process" in capsys.readouterr().err
        # what needs a restart is refused before anything is touched
        other = placement_file(tmp_path / "other.yaml", running, TWO_DECODES, block_size=32)
        assert apply(running, repository, other) == 2
        assert "block_size=32" in capsys.readouterr().err
        assert roles(running) == served
