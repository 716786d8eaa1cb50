"""An instance in memory that speaks the real wire protocol: deterministic model, faults on demand."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from distserve.serving.orchestrator_config import InstanceSpec
from distserve.serving.schema import ServingError, decode, error_reply, ok_reply
from distserve.transfer.handle import Layout

_EPOCHS = itertools.count(1)


def next_token(tokens: Sequence[int], vocab: int) -> int:
    """The model: a token that depends on all tokens before it."""
    digest = hashlib.blake2s(b"".join(t.to_bytes(4, "little") for t in tokens), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab


def generate(prompt: Sequence[int], count: int, vocab: int, end_ids: Sequence[int] = ()) -> list[int]:
    """What a client must get, whatever happens on the way."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab))
        if tokens[-1] in end_ids:
            break
    return tokens[len(prompt) :]


@dataclass
class _Running:
    entry: dict[str, Any]
    tokens: list[int]
    produced: int


@dataclass
class _Owner:
    epoch: int
    seq: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    waiter: asyncio.Event = field(default_factory=asyncio.Event)


class Network:
    """All engines by name, for the transfer between them."""

    def __init__(self, vocab: int = 200, end_ids: Sequence[int] = (), step_s: float = 0.002) -> None:
        self.vocab, self.end_ids, self.step_s = vocab, tuple(end_ids), step_s
        self.engines: dict[str, EngineDouble] = {}
        self.calls: list[tuple[str, str]] = []
        self.submits: dict[str, list[str]] = {}

    def add(self, name: str, role: str, **settings: Any) -> EngineDouble:
        engine = self.engines[name] = EngineDouble(self, name, role, **settings)
        return engine

    def connect(self, spec: InstanceSpec) -> DoubleClient:
        return DoubleClient(self, spec.name)

    def close(self) -> None:
        for engine in self.engines.values():
            engine.kill()


class DoubleClient:
    """`InstanceClient` to an engine of the network, found by name at every call."""

    def __init__(self, network: Network, name: str) -> None:
        self._network, self._name = network, name

    hung_calls = 0

    async def call(self, message: bytes, deadline_s: float) -> bytes:
        engine = self._network.engines.get(self._name)
        if engine is None or engine.dead:
            raise ServingError("UNAVAILABLE", "the engine has ended")
        try:
            return await asyncio.wait_for(engine.answer(message), deadline_s)
        except asyncio.TimeoutError:
            raise ServingError("DEADLINE_EXCEEDED", f"no reply within {deadline_s:g} s") from None

    async def close(self) -> None:
        return None


class EngineDouble:
    """One engine. ``credits`` is the budget of prompt tokens it takes at a time."""

    def __init__(
        self,
        network: Network,
        name: str,
        role: str,
        blocks: int = 1000,
        max_context: int = 4096,
        credits: int = 512,
        heartbeat_s: float = 0.1,
        max_batch_size: int = 64,
        prefill_s: float = 0.0,
        model_hash: str = "m",
        dtype: str = "fp32",
        pieces_above: int | None = None,
    ) -> None:
        self.network, self.name, self.role = network, name, role
        self.blocks, self.max_context, self.max_credits = blocks, max_context, credits
        self.heartbeat_s, self.max_batch_size, self.prefill_s = heartbeat_s, max_batch_size, prefill_s
        self.model_hash = model_hash
        self.layout = Layout(model_hash, dtype, 16, 1, 1, 8, 1, 1, "double")
        self.pieces_above = pieces_above
        self.pace = (0, 0, 0)  # what it tells of its prefill steps: how many, their tokens and microseconds
        self.more: dict[str, float] = {}  # entries of its status
        self.dead = False
        self.frozen: asyncio.Event | None = None
        self.lose_replies: dict[str, int] = {}  # op -> how many of the next replies get lost
        self.refuse: dict[str, ServingError] = {}  # op -> error of every request
        self.paused = False  # takes requests, computes nothing
        self.lose_next_finish = False
        self._boot()

    def _boot(self) -> None:
        self.epoch = next(_EPOCHS)
        self.owners: dict[str, _Owner] = {}
        self.queue: dict[str, tuple[str, dict[str, Any]]] = {}  # id -> owner, entry
        self.running: dict[str, tuple[str, _Running]] = {}
        self.leases: dict[str, list[int]] = {}
        self.known: set[str] = set()
        self.max_running = 0
        self._task = asyncio.get_running_loop().create_task(self._steps())

    # faults

    def kill(self) -> None:
        """All state is gone; calls in flight fail at once."""
        self.dead = True
        self._task.cancel()
        for owner in self.owners.values():
            owner.waiter.set()

    def restart(self) -> None:
        if not self.dead:
            self.kill()
        self.dead = False
        self._boot()

    def freeze(self) -> None:
        """Alive but silent."""
        self.frozen = asyncio.Event()

    def thaw(self) -> None:
        if self.frozen is not None:
            self.frozen.set()
            self.frozen = None

    @property
    def idle(self) -> bool:
        return not (self.queue or self.running or self.leases)

    # protocol

    async def answer(self, message: bytes) -> bytes:
        if self.frozen is not None:
            await self.frozen.wait()
        epoch = self.epoch
        call = decode(message)
        op = call["op"]
        self.network.calls.append((self.name, op))
        try:
            reply = await getattr(self, f"_{op}")(call)
        except ServingError as error:
            reply = error_reply(error)
        if self.dead or self.epoch != epoch:
            raise ServingError("UNAVAILABLE", "the engine has ended")
        if self.lose_replies.get(op, 0) > 0:
            self.lose_replies[op] -= 1
            raise ServingError("DEADLINE_EXCEEDED", "the reply was lost")
        return reply

    def _owner(self, call: dict[str, Any]) -> _Owner:
        owner = self.owners.get(call["owner"])
        if owner is None or owner.epoch != call["epoch"]:
            owner = self.owners[call["owner"]] = _Owner(call["epoch"])
        return owner

    def _load(self) -> dict[str, Any]:
        queued = sum(len(entry["prompt"]) for _, entry in self.queue.values())
        return {
            "blocks_free": self.blocks,
            "queued": len(self.queue),
            "queued_tokens": queued,
            "running": len(self.running),
            "leases": len(self.leases),
            "transfers_pending": 0,
            "credits": self.max_credits - queued,
            "preemptions": 0,
            **dict(zip(("prefill_steps", "prefill_tokens", "prefill_us"), self.pace, strict=True)),
        }

    async def _status(self, call: dict[str, Any]) -> bytes:
        return ok_reply(
            instance=self.name,
            role=self.role,
            epoch=self.epoch,
            layout=self.layout.to_wire(),
            model_hash=self.model_hash,
            max_context=self.max_context,
            block_size=16,
            blocks_total=self.blocks,
            max_batch_size=self.max_batch_size,
            max_batch_tokens=self.max_credits // 2,
            pieces_above=self.pieces_above,
            **self.more,
            **self._load(),
        )

    async def _submit(self, call: dict[str, Any]) -> bytes:
        self._owner(call)
        results = []
        for entry in call["requests"]:
            error = self.refuse.get("submit")
            if error is not None:
                results.append({"id": entry["id"], "ok": False, "error": error.to_wire()})
                continue
            results.append({"id": entry["id"], "ok": True})
            if entry["id"] not in self.known:
                self.known.add(entry["id"])
                self.queue[entry["id"]] = (call["owner"], entry)
                self.network.submits.setdefault(entry["id"], []).append(self.name)
        return ok_reply(results=results)

    async def _poll(self, call: dict[str, Any]) -> bytes:
        owner = self._owner(call)
        owner.events = [event for event in owner.events if event["seq"] > call["ack"]]
        if not owner.events:
            owner.waiter.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(owner.waiter.wait(), self.heartbeat_s)
        return ok_reply(epoch=self.epoch, seq=owner.seq, events=owner.events, load=self._load())

    async def _cancel(self, call: dict[str, Any]) -> bytes:
        for request_id in call["ids"]:
            for table in (self.queue, self.running, self.leases):
                table.pop(request_id, None)  # type: ignore[attr-defined]
        return ok_reply()

    async def _release(self, call: dict[str, Any]) -> bytes:
        for request_id in call["ids"]:
            self.leases.pop(request_id, None)
        return ok_reply()

    async def _renew(self, call: dict[str, Any]) -> bytes:
        return ok_reply()

    # the engine

    def _event(self, owner_name: str, **event: Any) -> None:
        owner = self.owners[owner_name]
        owner.seq += 1
        owner.events.append({"seq": owner.seq, **event})
        owner.waiter.set()

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(self.network.step_s)
            if self.frozen is not None:
                await self.frozen.wait()
            if self.paused:
                continue
            for request_id, (owner, running) in list(self.running.items()):
                self._decode(request_id, owner, running)
            for request_id, (owner, entry) in list(self.queue.items()):
                if self.prefill_s and self.role != "decode":
                    await asyncio.sleep(self.prefill_s)
                if self.queue.pop(request_id, None) is not None:
                    self._begin(request_id, owner, entry)
            self.max_running = max(self.max_running, len(self.running))

    def _begin(self, request_id: str, owner: str, entry: dict[str, Any]) -> None:
        tokens = [*entry["prompt"], *entry["output"]]
        if entry.get("handle") is not None:
            assert self.role == "decode"
            self._pull(request_id, owner, entry, tokens)
            return
        token = next_token(tokens, self.network.vocab)
        produced = len(entry["output"]) + 1
        reason = self._reason(entry, token, produced)
        event: dict[str, Any] = {"queue_s": 0.0, "prefill_s": 0.001, "token": token}
        if entry["sampling"]["logprobs"] is not None:
            event["logprob"] = {"logprob": -1.0, "top_ids": [token], "top_logprobs": [-1.0]}
        if reason is not None:
            event["finished"] = reason
        elif self.role == "prefill" and not entry.get("to_end"):
            self.leases[request_id] = tokens
            event["handle"] = {"instance": self.name, "epoch": self.epoch, "id": request_id}
        else:
            self.running[request_id] = (owner, _Running(entry, [*tokens, token], produced))
        self._event(owner, id=request_id, type="prefilled", **event)

    def _pull(self, request_id: str, owner: str, entry: dict[str, Any], tokens: list[int]) -> None:
        handle = entry["handle"]
        source = self.network.engines.get(handle["instance"])
        kv = None
        if source is not None and not source.dead and source.epoch == handle["epoch"]:
            kv = source.leases.pop(handle["id"], None)
        if kv is None or kv != tokens[:-1]:
            error = ServingError("FAILED_PRECONDITION", "stale handle").to_wire()
            self._event(owner, id=request_id, type="finished", reason="error", error=error)
            return
        self._event(owner, id=request_id, type="started", queue_s=0.0, transfer_s=0.0005)
        self.running[request_id] = (owner, _Running(entry, tokens, len(entry["output"])))

    def _decode(self, request_id: str, owner: str, running: _Running) -> None:
        token = next_token(running.tokens, self.network.vocab)
        running.tokens.append(token)
        running.produced += 1
        event: dict[str, Any] = {"tokens": [token]}
        if running.entry["sampling"]["logprobs"] is not None:
            event["logprobs"] = [{"logprob": -1.0, "top_ids": [token], "top_logprobs": [-1.0]}]
        self._event(owner, id=request_id, type="token", **event)
        reason = self._reason(running.entry, token, running.produced)
        if reason is not None:
            del self.running[request_id]
            self._event(owner, id=request_id, type="finished", reason=reason)

    def _reason(self, entry: dict[str, Any], token: int, produced: int) -> str | None:
        sampling = entry["sampling"]
        ends = set(sampling["stop_token_ids"])
        if not sampling["ignore_eos"]:
            ends |= set(self.network.end_ids)
        if token in ends and produced >= sampling["min_tokens"]:
            return "stop"
        return "length" if produced >= entry["max_tokens"] else None

    def evict(self, request_id: str) -> None:
        """Give up a running request for want of memory."""
        self.end_with(ServingError("RESOURCE_EXHAUSTED", "evicted"), request_id)

    def end_with(self, error: ServingError, request_id: str | None = None) -> None:
        """End a running request, any if none is named, with an error."""
        request_id = request_id or next(iter(self.running))
        owner, _ = self.running.pop(request_id)
        self._event(owner, id=request_id, type="finished", reason="error", error=error.to_wire())
