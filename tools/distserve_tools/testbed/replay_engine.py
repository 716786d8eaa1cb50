"""A load-only instance: the real mailbox and protocol, and in place of a model a clock that hands out tokens.

What it is for is the cost of everything around engines. Two things travel in token ids, since a request and
its answer have nothing else that everybody passes on untouched:

* the first id of a prompt says how many units of `GAP_UNIT_S` lie between two tokens of the answer;
* every id of an answer is the moment at which its event was made, in units of `STAMP_UNIT_S` modulo the
  vocabulary (see `stamp` and `age_s`).

Started like an engine: `python -m distserve_tools.testbed.replay_engine --fd N`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig, resolve_model
from distserve.engine.admission import Admission, Bounds
from distserve.engine.connection import FrameConnection
from distserve.engine.inbox import Inbox
from distserve.engine.mailbox import Mailbox
from distserve.engine.ops import DropOwner, Manage, Op, Pulled, Submit
from distserve.engine.requests import EngineRequest, Event
from distserve.engine.status import Load
from distserve.serving.frames import CONTROL_CALL, pack_frame, read_frame
from distserve.serving.schema import ok_reply
from distserve.transfer.handle import Handle, Layout, new_nonce

GAP_UNIT_S = 1e-4
STAMP_UNIT_S = 1e-5
BLOCKS = 1 << 16
CREDITS = 1 << 20
IDLE_S = 0.5
OWNER_TIMEOUT_S = 30.0
FLUSH_S = 1.0


def stamp(now_s: float, vocab_size: int) -> int:
    """A token id that says when it was made."""
    return int(now_s / STAMP_UNIT_S) % vocab_size


def age_s(token: int, now_s: float, vocab_size: int) -> float:
    """How long ago a token was made; the same clock (one host). Ages wrap at `vocab_size` units."""
    return (int(now_s / STAMP_UNIT_S) - token) % vocab_size * STAMP_UNIT_S


@dataclass(slots=True)
class _Answer:
    state: EngineRequest
    gap_s: float
    next_s: float


class Replay:
    """The loop: answers of all running requests, each at its own pace, those due together in one go."""

    def __init__(self, config: EngineConfig, model: ModelConfig, inbox: Inbox[Op]) -> None:
        self._config, self._model, self._inbox = config, model, inbox
        self._running: dict[str, _Answer] = {}
        self._taken = self._taken_tokens = 0
        self._events: list[Event] = []
        self.epoch = int(time.time() * 1000)
        self.layout = Layout("replay", config.dtype, config.block_size, 1, 1, 1, 1, 1, "none")

    def load(self) -> Load:
        return Load(
            blocks_free=BLOCKS,
            running=len(self._running),
            credits=CREDITS,
            taken=self._taken,
            taken_tokens=self._taken_tokens,
        )

    def run(self, mailbox: Mailbox) -> None:
        """Until the inbox is stopped."""
        while self._inbox.stopped is None:
            for op in self._inbox.take(self._wait_s()):
                self._handle(op)
            now = time.monotonic()
            for answer in list(self._running.values()):
                if answer.next_s <= now:
                    self._token(answer)
            if self._events:
                events, self._events = self._events, []
                mailbox.publish(events, self.load())

    def _wait_s(self) -> float:
        if not self._running:
            return IDLE_S
        return max(0.0, min(a.next_s for a in self._running.values()) - time.monotonic())

    def _handle(self, op: Op) -> None:
        if isinstance(op, Submit):
            self._accept(op.request)
        elif isinstance(op, Manage) and op.kind == "cancel":
            for key, answer in list(self._running.items()):
                if answer.state.owner == op.owner and answer.state.id in op.ids:
                    del self._running[key]
                    self._emit(answer.state, {"type": "finished", "reason": "cancelled"}, last=True)
        elif isinstance(op, DropOwner):
            gone = [key for key, answer in self._running.items() if answer.state.owner == op.owner]
            for key in gone:
                del self._running[key]
        else:
            assert isinstance(op, (Manage, Pulled))  # leases hold nothing here

    def _accept(self, state: EngineRequest) -> None:
        self._taken += 1
        self._taken_tokens += state.work_tokens
        now = time.monotonic()
        if self._config.role == "decode":
            self._emit(state, {"type": "admitted", "queue_s": now - state.arrival_s})
            self._emit(state, {"type": "started", "queue_s": now - state.arrival_s, "transfer_s": 0.0})
        else:
            token = stamp(now, self._model.vocab_size)
            fields = {"type": "prefilled", "token": token, "queue_s": now - state.arrival_s, "prefill_s": 0.0}
            reason = state.take_token(token)
            if reason is not None:
                self._emit(state, {**fields, "finished": reason}, last=True)
                return
            if self._config.role == "prefill":
                self._emit(state, {**fields, "handle": self._handle_of(state, token)}, last=True)
                return
            self._emit(state, fields)
        gap_s = max(1, state.tokens[0]) * GAP_UNIT_S
        # all requests of one pace keep step, as in a batch
        self._running[state.key] = _Answer(state, gap_s, (now // gap_s + 1) * gap_s)

    def _handle_of(self, state: EngineRequest, token: int) -> dict[str, Any]:
        known = len(state.tokens) - 1
        return Handle(
            self._config.instance, self.epoch, state.id, new_nonce(), known, token, self.layout, ("none:1",)
        ).to_wire()  # fmt: skip

    def _token(self, answer: _Answer) -> None:
        token = stamp(time.monotonic(), self._model.vocab_size)
        reason = answer.state.take_token(token)
        self._emit(answer.state, {"type": "token", "tokens": [token]})
        answer.next_s += answer.gap_s
        if reason is not None:
            del self._running[answer.state.key]
            self._emit(answer.state, {"type": "finished", "reason": reason, "preemptions": 0}, last=True)

    def _emit(self, state: EngineRequest, fields: dict[str, Any], last: bool = False) -> None:
        self._events.append(Event(state.owner, state.id, fields, last))


def serve(sock: socket.socket) -> None:
    """One instance at the other end of a stub's socket, until the stub is gone."""
    frame = read_frame(sock)
    if frame is None:
        return
    config = EngineConfig.load(json.loads(frame[1]))
    model = ModelConfig.load(resolve_model(config.model))
    inbox: Inbox[Op] = Inbox()
    signal.signal(signal.SIGTERM, lambda *_: inbox.stop("SIGTERM"))
    replay = Replay(config, model, inbox)
    bounds = Bounds.of(config, model, BLOCKS)
    identity = {
        "instance": config.instance,
        "role": config.role,
        "epoch": replay.epoch,
        "model_hash": "replay",
        "layout": replay.layout.to_wire(),
        "max_context": bounds.max_context,
        "block_size": config.block_size,
        "blocks_total": BLOCKS,
        "max_batch_size": config.max_batch_size,
        "max_batch_tokens": config.max_batch_tokens,
        "pieces_above": None,
        "pid": os.getpid(),
    }
    sock.sendall(pack_frame(CONTROL_CALL, ok_reply(**identity)))
    mailbox = Mailbox(
        FrameConnection(sock),
        inbox,
        Admission(bounds, replay.layout if config.role == "decode" else None),
        lambda load, _step_times: {**identity, **load.to_wire()},
        replay.load(),
        epoch=replay.epoch,
        max_queue=config.max_queue,
        heartbeat_s=config.heartbeat_s,
        owner_timeout_s=OWNER_TIMEOUT_S,
        batch_tokens=config.max_batch_tokens,
    )
    mailbox.start()
    try:
        replay.run(mailbox)
    finally:
        mailbox.close(FLUSH_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; `--fd` is the descriptor of the socket to the stub."""
    parser = argparse.ArgumentParser(prog="replay_engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=parser.parse_args(argv).fd))
    return 0


if __name__ == "__main__":
    sys.exit(main())
