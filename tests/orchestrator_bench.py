"""An orchestrator on instances in memory, with what tests of it need."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from distserve.serving.chunk import Chunk, Final
from distserve.serving.client_request import ClientRequest
from distserve.serving.detokenizer import ByteDetokenizer, Detokenizer
from distserve.serving.metric_families import FAMILIES, Kind
from distserve.serving.metrics import Metric, Metrics
from distserve.serving.orchestrator import Orchestrator
from distserve.serving.orchestrator_config import InstanceSpec, OrchestratorConfig
from distserve.serving.params import Parameters
from distserve.serving.schema import ServingError
from distserve.serving.session import Session
from engine_double import EngineDouble, Network

VOCAB = 200


class LetterCodec:
    """Token i is one letter; text has a token per letter."""

    vocab_size = VOCAB
    end_ids: frozenset[int] = frozenset()
    max_token_bytes = 2

    def encode(self, text: str) -> list[int]:
        return [ord(char) % VOCAB for char in text]

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        return ByteDetokenizer(lambda token: letter(token).encode())

    def decode_token(self, token: int) -> str:
        return letter(token)


def letter(token: int) -> str:
    return chr(0x4E00 + token)  # one character of three bytes each


def text_of(tokens: Sequence[int]) -> str:
    return "".join(map(letter, tokens))


class MemoryMetrics:
    """A metric back end that keeps the values."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], list[float]] = {}

    def metric(
        self, name: str, description: str, kind: Kind, labels: Mapping[str, str], buckets: list[float]
    ) -> Metric:
        assert FAMILIES[name].labels == tuple(labels)
        assert description
        assert bool(buckets) == (kind == "HISTOGRAM")
        values = self.values[(name, tuple(sorted(labels.items())))] = []

        class Kept:
            def increment(self, value: float) -> None:
                values.append(value)

            set = observe = increment

        return Kept()

    def total(self, name: str, **labels: str) -> float:
        return sum(self.values.get((name, tuple(sorted(labels.items()))), []))


class Recorder:
    """A sink; awaits its end."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.error: ServingError | None = None
        self.ends = 0
        self.done = asyncio.Event()
        self.progress = asyncio.Event()

    def send(self, chunk: Chunk) -> None:
        assert self.ends == 0, "a message after the final one"
        self.chunks.append(dataclasses.replace(chunk, ids=list(chunk.ids)))
        self.progress.set()
        if chunk.final is not None:
            self.ends += 1
            self.done.set()

    def fail(self, error: ServingError) -> None:
        assert self.ends == 0, "a second end"
        self.error = error
        self.ends += 1
        self.done.set()

    async def end(self, timeout_s: float = 10.0) -> None:
        await asyncio.wait_for(self.done.wait(), timeout_s)

    async def tokens(self, count: int) -> None:
        while len(self.ids) < count:
            self.progress.clear()
            await asyncio.wait_for(self.progress.wait(), 5.0)

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.ids]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def final(self) -> Final:
        assert self.error is None, self.error
        final = self.chunks[-1].final
        assert final is not None
        return final


class Bench:
    """An orchestrator with a network of doubles."""

    def __init__(self, network: Network, orchestrator: Orchestrator, metrics: MemoryMetrics) -> None:
        self.network, self.orchestrator, self.metrics = network, orchestrator, metrics
        self.sessions: list[Session | None] = []

    async def request(self, prompt: Sequence[int] | str, max_tokens: int = 8, **params: Any) -> Recorder:
        sink = Recorder()
        given = Parameters(max_tokens=max_tokens, **{"stream": True, **params})
        text = prompt if isinstance(prompt, str) else None
        ids = None if isinstance(prompt, str) else tuple(prompt)
        self.sessions.append(await self.orchestrator.serve(ClientRequest(given, text=text, ids=ids), sink))
        return sink

    def engine(self, name: str) -> EngineDouble:
        return self.network.engines[name]

    @property
    def session(self) -> Session:
        session = self.sessions[-1]
        assert session is not None
        return session

    async def until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        end = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            assert asyncio.get_running_loop().time() < end, "condition did not come true"
            await asyncio.sleep(0.005)

    async def settled(self) -> None:
        """Nothing of any request is left anywhere."""
        alive = [engine for engine in self.network.engines.values() if not engine.dead]
        await self.until(lambda: all(engine.idle for engine in alive))
        assert not self.orchestrator.sessions
        assert len(self.orchestrator.router) == self.orchestrator.router.handoffs == 0
        for link in self.orchestrator.fleet:
            assert link.idle
            assert link.load.outstanding_tokens == link.load.unsent_tokens == 0


Scenario = Callable[[Bench], Awaitable[None]]
CONFIG = OrchestratorConfig(
    model="none",
    heartbeat_s=0.1,
    silence_s=0.4,
    call_timeout_s=0.5,
    unavailable_after_s=0.8,
    lease_renew_s=0.1,
    hop_timeout_s=5.0,
    drain_s=0.5,
)


def run(
    scenario: Scenario,
    roles: Sequence[str] = ("prefill", "decode"),
    config: OrchestratorConfig = CONFIG,
    engines: Mapping[str, Mapping[str, Any]] | None = None,
    groups: Mapping[str, str] | None = None,
    **network: Any,
) -> None:
    """Run one scenario on instances named prefill_0, decode_0, decode_1, ..."""

    async def main() -> None:
        others = asyncio.all_tasks()
        net = Network(vocab=VOCAB, **network)
        counts: dict[str, int] = {}
        specs = []
        for role in roles:
            name = f"{role}_{counts.setdefault(role, 0)}"
            counts[role] += 1
            net.add(name, role, **(engines or {}).get(name, {}))
            specs.append(InstanceSpec(name, role, group=(groups or {}).get(name)))  # type: ignore[arg-type]
        backend = MemoryMetrics()
        metrics = Metrics(backend)
        full = dataclasses.replace(config, instances=tuple(specs))
        orchestrator = Orchestrator(full, LetterCodec(), net.connect, metrics, "test")
        await orchestrator.start()
        try:
            await scenario(Bench(net, orchestrator, backend))
        finally:
            await orchestrator.stop()
            net.close()
            metrics.close()
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - others
        assert not left, f"tasks left: {left}"

    asyncio.run(asyncio.wait_for(main(), 60.0))


def scenario(**settings: Any) -> Callable[[Scenario], Callable[[], None]]:
    """A test from a coroutine function."""

    def wrap(function: Scenario) -> Callable[[], None]:
        def test() -> None:
            run(function, **settings)

        test.__name__ = function.__name__
        test.__doc__ = function.__doc__
        return test

    return wrap
