"""One pass: a server, the load, `planner watch` beside it or not, and which instances served when."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distserve.core.model_config import ModelConfig, resolve_model
from distserve_planner.generate import generate
from distserve_planner.placement_file import parse_placement, read_placement
from distserve_planner.profile_file import Profile
from distserve_tools.client import Client, RequestError
from distserve_tools.console import StepLines
from distserve_tools.launch import ServerOptions
from distserve_tools.load.generator import make_jobs, run_open_loop
from distserve_tools.load.record import Record
from distserve_tools.load.triton_target import TritonTarget
from distserve_tools.stack import running
from distserve_tools.testbed.systems import cores
from distserve_tools.turnover.scenario import Scenario

_SAMPLE_S = 0.25
_REQUEST_S = 300.0
_WATCH_END_S = 10.0

Roles = Mapping[str, int]


@dataclass(frozen=True)
class Sample:
    """Instances that take requests, by role, `at_s` seconds after the first request was due."""

    at_s: float
    roles: Roles


@dataclass(frozen=True)
class Pass:
    """What one pass gave. `placed`: roles of the placement file at the end; `told`: what the watch said."""

    records: Sequence[Record]
    samples: Sequence[Sample]
    placed: Roles
    told: str

    @property
    def change_s(self) -> tuple[float, float] | None:
        """When the first instance left, and when all of the last placement served; None: nothing changed."""
        first = self.samples[0].roles
        if self.placed == first:
            return None
        begin = next(s.at_s for s in self.samples if s.roles != first)
        end = next((s.at_s for s in self.samples if s.roles == self.placed), float("inf"))
        return begin, end


def run_pass(
    scenario: Scenario, profile_path: Path, folder: Path, watched: bool, say: Callable[[str], None]
) -> Pass:
    """Everything is written into `folder`: repository, placement, request log, advice, logs."""
    folder.mkdir(parents=True, exist_ok=True)
    log, placement = folder / "requests.jsonl", folder / "placement.yaml"
    log.unlink(missing_ok=True)
    batch_tokens = Profile.load(profile_path).latency_model().lm_tokens_for(1)
    placement.write_text(scenario.placement(cores(), max(scenario.second.input_tokens, batch_tokens), log))
    repository = folder / "repository"
    generate(read_placement(placement), repository, force=True)
    trace = scenario.trace()
    vocab = ModelConfig.load(resolve_model(scenario.model)).vocab_size
    jobs = make_jobs(trace, vocab, scenario.seed)
    options = ServerOptions(repository, log_path=folder / "tritonserver.log")
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(running(options, StepLines())).server.grpc_url
        told = folder / "watch.log"
        if watched:
            words = [*scenario.watch_words(profile_path), "--log", str(log), "--placement", str(placement)]
            words += ["--advice", str(folder / "advice"), "--apply", "--grpc", url]
            stack.enter_context(_watch([*words, "--model-repository", str(repository)], told))
        say(f"{len(trace)} requests in {scenario.first_s + scenario.second_s:.0f} s")
        samples: list[Sample] = []
        with _sampling(url, samples):
            records = asyncio.run(
                run_open_loop(lambda start: TritonTarget(url, start, _REQUEST_S), trace, jobs)
            )
    placed = Counter(str(i.role) for i in parse_placement(placement.read_text()).placement.instances)
    return Pass(records, samples, placed, told.read_text() if watched else "")


@contextlib.contextmanager
def _watch(words: Sequence[str], log_path: Path) -> Iterator[None]:
    with log_path.open("wb") as log:
        # it searches on the cores that serve
        command = ["nice", "-n", "10", sys.executable, "-m", "distserve_planner", "watch", *words]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(_WATCH_END_S)


@contextlib.contextmanager
def _sampling(url: str, samples: list[Sample]) -> Iterator[None]:
    """Notes the roles that serve, until the end."""
    stop, begin_s = threading.Event(), time.monotonic()

    def sample() -> None:
        with Client(url) as client:
            while not stop.wait(_SAMPLE_S):
                with contextlib.suppress(RequestError):
                    entries = client.control("status")["instances"]
                    roles = Counter(str(e["role"]) for e in entries if e["usable"])
                    samples.append(Sample(time.monotonic() - begin_s, roles))

    thread = threading.Thread(target=sample, name="roles", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
