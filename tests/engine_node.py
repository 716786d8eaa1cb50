"""An engine without threads and sockets: loop and roles over an executor that keeps token ids in its pages.

A wrong block shows as a wrong token. Each test drives turns by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from distserve.core.blocks import BlockManager
from distserve.core.config import Policy
from distserve.core.decode_scheduler import DecodeScheduler
from distserve.core.prefill_scheduler import PrefillScheduler
from distserve.core.scheduler import Limits
from distserve.core.unified_scheduler import UnifiedScheduler
from distserve.engine.admission import Admission, Bounds
from distserve.engine.decode_role import DecodeRole
from distserve.engine.inbox import Inbox
from distserve.engine.loop import EngineLoop
from distserve.engine.ops import Manage, Op, Submit
from distserve.engine.prefill_role import PrefillRole
from distserve.engine.requests import Event, Owner
from distserve.engine.roles import Role, UnifiedRole
from distserve.engine.status import Load
from distserve.transfer.handle import Handle, Layout
from distserve.transfer.leases import LeaseTable
from distserve.worker.step import LAST_SAMPLED, StepInput, StepOutput

BLOCK = 4
VOCAB = 97
LAYOUT = Layout("hash", "fp32", BLOCK, 1, 1, 8, 1, 1, "fake")
OWNER = Owner("o", 1)


def next_token(tokens: Sequence[int]) -> int:
    """The oracle: depends on every token and its place."""
    return sum((i + 3) * token for i, token in enumerate(tokens)) % VOCAB


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class PageExecutor:
    """Writes the ids it is given to the slots of the block table and samples from what the pages hold."""

    def __init__(self, num_blocks: int, stages: int = 1, lag: int = 0) -> None:
        self.num_blocks = num_blocks
        self.lag = lag
        self.sampled: dict[str, int] = {}  # by the step before
        self.attention = "pages of ids"
        self.pages: list[list[int]] = [[-1] * BLOCK for _ in range(num_blocks)]
        self.known: set[str] = set()
        self.fail_with: Exception | None = None
        self.steps: list[StepInput] = []
        self.depth = stages
        self.outputs: list[StepOutput] = []
        self.landing = stages == 1  # steps end at once; else as many as the test lets end by `land`
        self.landed = 0
        self.lost: Exception | None = None

    @property
    def kv_cache(self) -> Any:
        raise NotImplementedError

    def submit(self, step: StepInput) -> None:
        self.outputs.append(self.execute(step))

    def collect(self, wait_s: float = 0.0) -> StepOutput | None:
        if self.lost is not None:
            raise self.lost
        if not self.outputs or not (self.landing or self.landed):
            return None
        if self.lag and len(self.outputs) <= self.lag and not wait_s:
            return None  # as late as it may be
        self.landed -= not self.landing
        return self.outputs.pop(0)

    def land(self) -> None:
        """The oldest step in flight ends."""
        self.landed += 1

    def listen(self, on_news: Callable[[], None]) -> None:
        pass

    def execute(self, step: StepInput) -> StepOutput:
        self.known.difference_update(step.leaving)
        self.known.update(joining.key for joining in step.joining)
        if self.fail_with is not None:
            raise self.fail_with
        self.steps.append(step)
        if any(item.tokens == [LAST_SAMPLED] for item in step.items):
            assert all(len(item.tokens) == 1 for item in step.items)  # such steps only decode
        sampled: list[int] = []
        fresh: dict[str, int] = {}
        for item in step.items:
            assert item.key in self.known
            end = item.start + len(item.tokens)
            given = [self.sampled[item.key]] if item.tokens == [LAST_SAMPLED] else item.tokens
            for place, token in zip(range(item.start, end), given, strict=True):
                self.pages[item.block_table[place // BLOCK]][place % BLOCK] = token
            if item.sample:
                held = [self.pages[item.block_table[p // BLOCK]][p % BLOCK] for p in range(end)]
                sampled.append(next_token(held))
                fresh[item.key] = sampled[-1]
        self.sampled = fresh
        return StepOutput(sampled, [None] * len(sampled))

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Stats:
    bytes: int = 100
    wait_s: float = 0.0
    wire_s: float = 0.0


@dataclass
class ManualPuller:
    """Copies are done, or fail, when the test says so."""

    copies: list[tuple[Handle, list[int], Future[Any]]] = field(default_factory=list)
    cancelled: list[Future[Any]] = field(default_factory=list)
    pairs: int = 0

    def pull(self, handle: Handle, dst_blocks: Sequence[int], deadline: float) -> Future[Any]:
        future: Future[Any] = Future()
        self.copies.append((handle, list(dst_blocks), future))
        return future

    def cancel(self, future: Future[Any]) -> None:
        self.cancelled.append(future)

    def close(self) -> None:
        pass


class FixedSource:
    addresses = ("127.0.0.1:9",)

    def settle(self) -> None:
        pass

    def stats(self) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Node:
    """An instance without threads and sockets."""

    def __init__(
        self,
        role: str,
        num_blocks: int = 32,
        limits: Limits | None = None,
        policy: Policy = "prefill_first",
        stages: int = 1,
        lag: int = 0,
    ) -> None:
        self.now = 100.0
        limits = limits or Limits(max_batch_size=8, max_batch_tokens=24, chunk_tokens=6)
        self.inbox: Inbox[Op] = Inbox()
        self.executor = PageExecutor(num_blocks, stages, lag)
        self.blocks = BlockManager(num_blocks, BLOCK)
        self.puller = ManualPuller()
        self.leases = LeaseTable(lambda: self.now, self.inbox.poke)
        self.role = self._role(role, limits, policy, stages)
        self.loop = EngineLoop(self.role, self.executor, self.inbox, lambda: self.now)
        bounds = Bounds(role, 1000, num_blocks, BLOCK, VOCAB, ())
        self.admission = Admission(bounds, LAYOUT if role == "decode" else None)
        self.events: list[Event] = []
        self.load = Load()

    def _role(self, role: str, limits: Limits, policy: Policy, stages: int) -> Role:
        if role == "prefill":
            scheduler = PrefillScheduler(limits, self.blocks)
            identity = {"instance": "p", "epoch": 7, "layout": LAYOUT, "lease_s": 10.0}
            return PrefillRole(scheduler, self.blocks, self.leases, FixedSource(), stages=stages, **identity)  # type: ignore[arg-type]
        if role == "decode":
            return DecodeRole(
                DecodeScheduler(limits, self.blocks, stages), self.blocks, self.puller, self.inbox, 5.0
            )
        return UnifiedRole(UnifiedScheduler(limits, self.blocks, policy, stages), self.blocks)

    def publish(self, events: list[Event], load: Load) -> None:
        self.events += events
        self.load = load

    def submit(self, id: str, prompt: list[int], max_tokens: int, **entry: Any) -> None:
        entry = {"id": id, "prompt": prompt, "max_tokens": max_tokens, **entry}
        self.inbox.post(Submit(self.admission.admit(entry, OWNER, self.now)))

    def manage(self, kind: Any, *ids: str) -> None:
        self.inbox.post(Manage(kind, OWNER, ids))

    def turns(self, count: int = 1) -> None:
        for _ in range(count):
            self.inbox.poke()  # an idle loop must not sleep here
            self.loop.turn(self)

    def until(self, done: Callable[[], object]) -> None:
        for _ in range(1000):
            if done():
                return
            self.turns()
        raise AssertionError(f"not reached; {self.events[-5:]}")

    def of(self, id: str) -> list[dict[str, Any]]:
        return [event.fields for event in self.events if event.id == id]

    def last(self, id: str) -> dict[str, Any]:
        return self.of(id)[-1]

    def tokens(self, id: str) -> list[int]:
        out: list[int] = []
        for fields in self.of(id):
            out += [fields["token"]] if fields["type"] == "prefilled" else fields.get("tokens", [])
        return out

    def over(self, id: str) -> bool:
        return any(event.last for event in self.events if event.id == id)

    def assert_empty(self) -> None:
        self.turns(2)
        self.blocks.check_integrity()
        assert self.blocks.free == self.blocks.num_blocks
        load = self.load
        assert (load.queued, load.queued_tokens, load.running, load.leases, load.transfers_pending) == (
            0,
        ) * 5


def copy_pages(source: Node, target: Node, index: int = -1) -> None:
    """What a transfer does: claim, copy, confirm."""
    from distserve.core.shapes import Shape
    from distserve.transfer.leases import Claimant

    handle, blocks, future = target.puller.copies[index]
    claim = source.leases.claim(handle, Claimant("d", 1, Shape()), 0, frozenset({0}))
    for mine, theirs in zip(blocks, claim.blocks, strict=True):
        target.executor.pages[mine] = list(source.executor.pages[theirs])
    source.leases.confirm(claim)
    future.set_result(Stats())


def prefilled(node: Node, id: str, prompt: list[int], max_tokens: int, **entry: Any) -> dict[str, Any]:
    """The `submit` entry for decode, after the prompt was computed."""
    node.submit(id, prompt, max_tokens, **entry)
    node.until(lambda: node.over(id))
    event = node.last(id)
    assert event["type"] == "prefilled"
    output = [*entry.get("output", []), event["token"]]
    return {"id": id, "prompt": prompt, "max_tokens": max_tokens, "output": output, "handle": event["handle"]}
