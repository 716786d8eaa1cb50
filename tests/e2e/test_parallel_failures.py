"""One rank of several dies or stops: both sides agree on what became of a transfer, nothing hangs, other
pairs go on, blocks return; and an instance that has lost a rank ends as a whole.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_process import EngineProcess, Record
from model_zoo import Zoo, prompt
from parallel_pairs import Driver, Shaped, settings, started

TRANSFER_S = 2.5
LEASE_S = 20.0
LONG = 150  # tokens of output: still decoding when the test acts


def rank_pid(engine: EngineProcess) -> int:
    """The process of the instance's rank 1."""
    tasks = Path(f"/proc/{engine.process.pid}/task").glob("*/children")
    (pid,) = [int(pid) for task in tasks for pid in task.read_text().split()]
    return pid


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # the test has killed it
            os.kill(pid, signal.SIGCONT)


class Trio:
    """Two prefill instances, `p` of two ranks and `q` of one, and a decode instance of two ranks."""

    def __init__(self, driver: Driver, engines: dict[str, EngineProcess]) -> None:
        self.driver = driver
        self.p, self.q, self.d = engines["p"], engines["q"], engines["d"]

    def moved(self, p: EngineProcess, length: int, max_tokens: int = 12) -> dict[str, Any]:
        """A prompt computed on `p`, ready for decode."""
        (entry,) = self.driver.entries([prompt(length)], max_tokens)
        p.caller.accept(entry)
        return self.driver.handed_out(p, entry)

    def ended(self, entry: dict[str, Any]) -> Record:
        return self.d.caller.finish(entry["id"], 40.0)

    def works(self, p: EngineProcess, length: int) -> bool:
        tokens = prompt(length)
        return self.driver.through(p, self.d, [tokens]) == [self.driver.expected(tokens)]


@pytest.fixture
def trio(zoo: Zoo) -> Iterator[Trio]:
    torch.set_num_threads(1)
    model = zoo("llama")
    more: dict[str, Any] = {"transfer_timeout_s": TRANSFER_S, "lease_s": LEASE_S}
    configs = {
        "p": settings(model, "p", "prefill", Shaped(2, 1), **more),
        "q": settings(model, "q", "prefill", Shaped(1, 1), **more),
        "d": settings(model, "d", "decode", Shaped(1, 2), **more),
    }
    with started(configs) as engines:
        yield Trio(Driver(model), engines)


def test_a_rank_that_is_late_fails_the_transfer_on_all_ranks(trio: Trio) -> None:
    assert trio.works(trio.p, 40)
    epochs = [engine.status()["epoch"] for engine in (trio.p, trio.d)]

    late_source = trio.moved(trio.p, 41)
    with stopped(rank_pid(trio.p)):
        trio.d.caller.accept(late_source)
        assert trio.works(trio.q, 42)  # another pair, meanwhile
        record = trio.ended(late_source)
        assert record.error is not None
        assert record.error["code"] == "UNAVAILABLE"
        assert "transfer failed" in record.error["message"]
        trio.d.settled()
    assert trio.p.settled()["leases_confirmed"] == 1  # the first request's; the late one was no success

    late_puller = trio.moved(trio.q, 43)
    began = time.monotonic()
    with stopped(rank_pid(trio.d)):
        trio.d.caller.accept(late_puller)
        record = trio.ended(late_puller)
        assert record.error is not None
        assert record.error["code"] == "UNAVAILABLE"
        assert time.monotonic() - began >= TRANSFER_S
    trio.q.caller.manage(
        "release", late_puller["id"]
    )  # as an orchestrator does: rank 1 has not called at all
    assert trio.works(trio.p, 44)
    assert trio.works(trio.q, 45)
    for engine in (trio.p, trio.q, trio.d):
        engine.settled()
    assert [engine.status()["epoch"] for engine in (trio.p, trio.d)] == epochs


def test_a_rank_that_dies_ends_its_instance_and_no_other(trio: Trio) -> None:
    assert trio.works(trio.p, 40)
    running = trio.moved(trio.q, 46, LONG)
    trio.d.caller.accept(running)
    dead_source, unclaimed = trio.moved(trio.p, 41), trio.moved(trio.p, 33)
    pid = rank_pid(trio.p)
    with stopped(pid):
        trio.d.caller.accept(dead_source)
        time.sleep(0.3)  # the pull has begun
        os.kill(pid, signal.SIGKILL)
        assert trio.p.ended() == 1
    trio.d.caller.accept(unclaimed)
    for entry in (dead_source, unclaimed):
        record = trio.ended(entry)
        assert record.error is not None
        assert record.error["code"] == "UNAVAILABLE"
    assert trio.ended(running).error is None
    assert trio.works(trio.q, 42)
    assert trio.d.settled()["transfers_failed"] == 2

    running = trio.moved(trio.q, 47, LONG)
    trio.d.caller.accept(running)
    trio.d.caller.wait(running["id"], lambda record: record.tokens, 30.0)
    held = trio.moved(trio.q, 48)
    pid = rank_pid(trio.d)
    with stopped(pid):
        trio.d.caller.accept(held)
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        assert trio.d.ended() == 1
    record = trio.d.caller.records[running["id"]]
    assert record.error is not None  # told before the end
    assert record.error["code"] == "UNAVAILABLE"
    assert "rank 1 has ended with signal SIGKILL" in record.error["message"]
    trio.q.caller.manage("release", running["id"], held["id"])
    trio.q.settled()


def test_a_rank_that_dies_while_nothing_is_to_do_is_noticed(zoo: Zoo) -> None:
    engine = EngineProcess(**settings(zoo("llama"), "u", "unified", Shaped(2, 1)))
    os.kill(rank_pid(engine), signal.SIGKILL)
    assert engine.ended() == 1


def test_a_rank_that_hangs_is_given_up(zoo: Zoo) -> None:
    engine = EngineProcess(**settings(zoo("llama"), "u", "unified", Shaped(2, 1), rank_timeout_s=2.0))
    pid = rank_pid(engine)
    with stopped(pid):
        assert engine.ended() == 1
        assert not Path(f"/proc/{pid}").exists()


def test_ranks_end_with_their_leader(zoo: Zoo) -> None:
    engine = EngineProcess(**settings(zoo("llama"), "u", "unified", Shaped(2, 1)))
    pid = rank_pid(engine)
    engine.kill()
    engine.close()
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
