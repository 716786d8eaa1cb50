"""A running server becomes another placement under load: no error, right tokens, or everything as before."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from serving import Deployment, deployed
from under_load import DECODE_HEAVY, PREFILL_HEAVY, assert_no_loss, loaded, placement_file, roles, wait_for

from distserve_planner.folder_lock import exclusive
from distserve_planner.placement_file import read_placement
from distserve_planner.render import render
from distserve_tools.cli import main
from distserve_tools.client import RequestError
from distserve_tools.supervise import Supervisor, stubs_by_model
from model_zoo import Zoo


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

        with exclusive(repository, "changed"):  # another watcher is at it
            assert apply(running, repository, wanted) == 1
        assert "is being changed by process" in capsys.readouterr().err
        # what needs a restart is refused before anything is touched
        other = placement_file(tmp_path / "other.yaml", running, TWO_DECODES, block_size=32)
        assert apply(running, repository, other) == 2
        assert "block_size=32" in capsys.readouterr().err
        assert roles(running) == served


CHANGES = {
    "one decode instance more": ({"role": "prefill"}, {"role": "decode"}, {"role": "decode"}),
    "one less, and a prefill instance on two devices": ({"role": "prefill", "tp": 2}, {"role": "decode"}),
    "decode in two stages, prefill on one device": ({"role": "prefill"}, {"role": "decode", "pp": 2}),
    "colocated": (
        {"role": "unified", "policy": "chunked_prefill", "chunk_tokens": 32},
        {"role": "unified", "policy": "chunked_prefill", "chunk_tokens": 32},
    ),
    "another policy": ({"role": "unified", "policy": "prefill_first"},),
    "disaggregated again, both phases on two devices": (
        {"role": "prefill", "pp": 2},
        {"role": "decode", "tp": 2},
    ),
}


@pytest.mark.slow
def test_counts_shapes_and_colocation_change_under_load(zoo: Zoo, tmp_path: Path) -> None:
    """One change after the other on one server, under one load; each answer must be the greedy one."""
    repository, saved = tmp_path / "repository", tmp_path / "saved.yaml"
    with deployed(tmp_path, zoo("llama"), ({"role": "prefill"}, {"role": "decode"})) as running:
        with loaded(running, clients=3) as load:
            for number, (what, instances) in enumerate(CHANGES.items()):
                load.mix = PREFILL_HEAVY if number % 2 else DECODE_HEAVY
                wanted = placement_file(tmp_path / f"{number}.yaml", running, instances)
                assert apply(running, repository, wanted, "--save", str(saved)) == 0, what
                wait_for(load, 6)
                assert sorted(roles(running).values()) == sorted(str(i["role"]) for i in instances), what
                assert files(repository) == render(read_placement(saved).placement), what
        assert_no_loss(running, load)
