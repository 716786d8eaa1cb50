"""Handles that are stale, forged, used twice or meant for another, and garbage, straight to an instance."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from distserve.serving.access import TAG_BYTES, Access
from distserve.serving.schema import MAX_MESSAGE_BYTES, ServingError, decode_reply, encode
from distserve_tools.chaos.deployment import Deployment, send_signal
from distserve_tools.chaos.invariants import recover, settle
from distserve_tools.chaos.load import Job, jobs, references
from distserve_tools.chaos.outcome import Outcome
from distserve_tools.instance_caller import InstanceCaller

Wire = dict[str, Any]
LEASE_S = 10.0  # the engines' default
_RENEW_S = 0.5

FORGERIES: Mapping[str, Callable[[Wire, random.Random], Wire]] = {
    "nonce": lambda h, rng: {**h, "nonce": rng.randbytes(16)},
    "short nonce": lambda h, rng: {**h, "nonce": h["nonce"][:8]},
    "epoch before": lambda h, rng: {**h, "epoch": h["epoch"] - 1},
    "epoch after": lambda h, rng: {**h, "epoch": h["epoch"] + 1},
    "request id": lambda h, rng: {**h, "request_id": h["request_id"] + "0"},
    "instance": lambda h, rng: {**h, "instance": "prefill_9"},
    "fewer tokens": lambda h, rng: {**h, "num_tokens": h["num_tokens"] - 1},
    "more tokens": lambda h, rng: {**h, "num_tokens": h["num_tokens"] + 1},
    "first token": lambda h, rng: {**h, "first_token": h["first_token"] ^ 1},
    "model": lambda h, rng: _layout(h, model_hash="0" * 16),
    "dtype": lambda h, rng: _layout(h, dtype="bf16"),
    "block size": lambda h, rng: _layout(h, block_size=2 * h["layout"]["block_size"]),
    "layers": lambda h, rng: _layout(h, layers=h["layout"]["layers"] + 1),
    "kv heads": lambda h, rng: _layout(h, kv_heads=2 * h["layout"]["kv_heads"]),
    "page format": lambda h, rng: _layout(h, page_format="other"),
    "tp": lambda h, rng: {**_layout(h, tp=2), "addresses": h["addresses"] * 2},
    "ranks": lambda h, rng: _layout(h, tp=1 << 20),
    "no address": lambda h, rng: {**h, "addresses": []},
    "dead address": lambda h, rng: {**h, "addresses": ["127.0.0.1:9"]},
    "foreign host": lambda h, rng: {**h, "addresses": ["192.0.2.1:80"]},
    "not an address": lambda h, rng: {**h, "addresses": ["../../etc/passwd"]},
    "unknown key": lambda h, rng: {**h, "callback": "x"},
    "missing key": lambda h, rng: {k: v for k, v in h.items() if k != "epoch"},
    "not a map": lambda h, rng: {"handle": rng.randbytes(40)},
}
"""By the field that is wrong: a function of a good handle that makes it so."""

GARBAGE = (
    b"",
    b"\x81\x90\x01",  # a map with a list for a key
    b"\xdd\xff\xff\xff\xff",  # a list of 4 billion
    b"\x91" * 5000,  # lists in lists
    b"\xc7\x0c\xff" + b"\xff" * 12,  # a moment that does not exist
    b"cos\nsystem\n(S'true'\ntR.",  # a pickle
    bytes(MAX_MESSAGE_BYTES + 1),
)


def _layout(handle: Wire, **changed: Any) -> Wire:
    return {**handle, "layout": {**handle["layout"], **changed}}


@dataclass
class _Trial:
    deployment: Deployment
    job: Job
    expected: tuple[int, ...]
    prefill: InstanceCaller
    decodes: tuple[InstanceCaller, InstanceCaller]
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    numbers: int = 0

    def entry(self) -> Wire:
        self.numbers += 1
        job = self.job
        return {
            "id": f"trial-{self.numbers}",
            "prompt": list(job.prompt),
            "max_tokens": job.max_tokens,
            "sampling": {"temperature": 0.0, "ignore_eos": True},
        }

    def prefilled(self) -> Wire:
        """An entry for decode, with a good handle."""
        entry = self.entry()
        error = self.prefill.submit(entry)
        if error is not None:
            raise RuntimeError(f"prefill refused: {error}")
        event = self.prefill.events(entry["id"], ("prefilled", "finished"))[-1]
        return {**entry, "output": [event["token"]], "handle": event["handle"]}

    def release(self, entry: Wire) -> None:
        self.prefill.call("release", ids=[entry["id"]])

    def decode(self, what: str, entry: Wire, refused: bool, at: int = 0) -> None:
        """Has an entry decoded, and counts whether it was refused as it must be, or right as it must be."""
        caller = self.decodes[at]
        error = caller.submit(entry)
        tokens = list(entry["output"])
        if error is None:
            for event in caller.events(entry["id"], ("finished",)):
                tokens += event.get("tokens", [])
                error = event.get("error") or error
        if error is None and tokens == list(self.expected) and not refused:
            self.counts["finished"] += 1
        elif error is not None and tokens == entry["output"] and refused:
            self.counts["refused"] += 1
        else:
            self.counts["lost"] += 1
            self.notes.append(f"{what}: {error or f'{len(tokens)} tokens came'}")


def bad_handles(name: str, deployment: Deployment, seed: int) -> Outcome:
    """Every kind of bad handle, each between requests that must go through."""
    rng = random.Random(seed)
    job = Job(jobs(4, seed)[-1].prompt, 24)
    expected = references(deployment, [job])[job]
    url, owner = deployment.server.grpc_url, f"chaos-{os.getpid()}-{seed}"
    with ExitStack() as stack:
        callers = [
            stack.enter_context(InstanceCaller(url, instance, owner, deployment.server.access))
            for instance in ("prefill_0", "decode_0", "decode_1")
        ]
        trial = _Trial(deployment, job, expected, callers[0], (callers[1], callers[2]), rng)
        trial.decode("a good handle", trial.prefilled(), refused=False)
        _unsigned(trial)
        _garbage(trial)
        _forged(trial)
        _twice(trial)
        _released(trial)
        fault_s = _stale(trial)
    aftermath = settle(deployment, recover(deployment, job, expected, fault_s))
    return Outcome(name, seed, trial.counts, aftermath, trial.notes)


def _forged(trial: _Trial) -> None:
    for what, forge in FORGERIES.items():
        good = trial.prefilled()
        trial.decode(f"forged {what}", {**good, "handle": forge(good["handle"], trial.rng)}, refused=True)
        trial.release(good)
    mixed, other = trial.prefilled(), trial.prefilled()
    swapped = {**mixed["handle"], "nonce": other["handle"]["nonce"]}
    trial.decode("another request's nonce", {**mixed, "handle": swapped}, refused=True)
    for entry in (mixed, other):
        trial.release(entry)


def abandoned_kv(name: str, deployment: Deployment, seed: int) -> Outcome:
    """KV whose decode instance is dead (nobody renews it) is freed when its lease ends; KV of a slow one
    (it is renewed all the while) stays for more than a lease, and can be fetched then.
    """
    job = Job(jobs(4, seed)[-1].prompt, 24)
    expected = references(deployment, [job])[job]
    url, owner = deployment.server.grpc_url, f"chaos-{os.getpid()}-{seed}"
    with ExitStack() as stack:
        callers = [
            stack.enter_context(InstanceCaller(url, instance, owner, deployment.server.access))
            for instance in ("prefill_0", "decode_0", "decode_1")
        ]
        trial = _Trial(deployment, job, expected, callers[0], (callers[1], callers[2]), random.Random(seed))
        dead, slow = trial.prefilled(), trial.prefilled()
        began_s, freed_s = time.monotonic(), 0.0
        while (waited_s := time.monotonic() - began_s) < 1.5 * LEASE_S:
            trial.prefill.call("renew", ids=[slow["id"]])
            if not freed_s and trial.prefill.call("status")["leases"] == 1:
                freed_s = waited_s
            time.sleep(_RENEW_S)
        if not 0 < freed_s <= LEASE_S + 2 * _RENEW_S:
            trial.notes.append(f"KV of a dead decode instance: freed after {freed_s:.1f} s")
        trial.decode("expired", dead, refused=True)
        trial.decode("slow", slow, refused=False, at=1)
    aftermath = settle(deployment, recover(deployment, job, expected, time.monotonic()))
    return Outcome(name, seed, trial.counts, aftermath, trial.notes, {"freed_after_s": round(freed_s, 1)})


def _unsigned(trial: _Trial) -> None:
    """What a stranger may say, who does not have the server's secret: nothing."""
    caller = trial.decodes[0]
    entry = trial.prefilled()
    say = [
        encode({"op": op, "owner": "x", "epoch": time.time_ns(), "requests": [entry], "ids": [], "ack": 0})
        for op in ("status", "submit", "poll", "cancel", "release", "renew")
    ]
    foreign = [Access.made().sign(message) for message in say]
    cut = [trial.deployment.server.access.sign(message)[:-1] for message in say]
    for message in [*say, *foreign, *cut, b"", bytes(TAG_BYTES)]:
        code = _code(caller.unsigned(message))
        trial.counts["refused" if code == "FAILED_PRECONDITION" else "lost"] += 1
        if code != "FAILED_PRECONDITION":
            trial.notes.append(f"unsigned {message[:40]!r}: {code}")
    trial.decode("not touched by strangers", entry, refused=False)


def _code(reply: bytes) -> str:
    try:
        decode_reply(reply)
    except ServingError as error:
        return error.code
    return "no error"


def _garbage(trial: _Trial) -> None:
    """Messages that are none: refused with a reason, and the engine lives."""
    caller = trial.decodes[0]
    epoch = caller.call("status")["epoch"]
    good = encode({"op": "submit", "owner": "x", "epoch": 1, "requests": []})
    messages = [*GARBAGE, *(trial.rng.randbytes(trial.rng.randrange(1, 200)) for _ in range(20))]
    messages += [good[: trial.rng.randrange(1, len(good))] for _ in range(5)]
    messages += [encode({"op": "status", "v": 2}), encode({"op": "submit", "owner": "x", "epoch": 1})]
    for message in messages:
        code = _code(caller.raw(message))
        trial.counts["refused" if code == "INVALID_ARGUMENT" else "lost"] += 1
        if code != "INVALID_ARGUMENT":
            trial.notes.append(f"message {message[:20]!r}: {code}")
    if caller.call("status")["epoch"] != epoch:
        trial.notes.append("the engine has been started again")


def _twice(trial: _Trial) -> None:
    """One use, whether by the same instance or by two."""
    good = trial.prefilled()
    trial.decode("first use", good, refused=False)
    trial.decode("second use", {**good, "id": f"{good['id']}-again"}, refused=True)
    trial.decode("second use elsewhere", good, refused=True, at=1)


def _released(trial: _Trial) -> None:
    entry = trial.prefilled()
    trial.release(entry)
    time.sleep(0.2)  # a release is not waited for
    trial.decode("released", entry, refused=True)


def _stale(trial: _Trial) -> float:
    """The handle's engine has died; another one has its name. Returns when."""
    entry = trial.prefilled()
    fault_s = time.monotonic()
    send_signal(trial.deployment.engine("prefill_0"), signal.SIGKILL)
    trial.decode("stale", entry, refused=True)
    return fault_s
