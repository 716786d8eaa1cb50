"""One engine put together: model, KV pool, scheduler, role, loop and mailbox."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distserve.core.blocks import BlockManager
from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig, resolve_model
from distserve.engine.admission import Admission, Bounds
from distserve.engine.build import make_layout, make_role
from distserve.engine.connection import FrameConnection
from distserve.engine.inbox import Inbox
from distserve.engine.loop import EngineLoop
from distserve.engine.mailbox import Mailbox
from distserve.engine.ops import Op
from distserve.engine.status import Load, status_fields
from distserve.models.fingerprint import model_fingerprint
from distserve.worker.device import bind_device, parse_device
from distserve.worker.executor import make_executor

OWNER_PATIENCE = 3
"""An owner is given up after so many lease times without a poll."""


class Engine:
    """Everything of one instance but its socket.

    Loads the model and allocates the pool; raises `ConfigError` for what cannot be.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._started_s = clock()
        bind_device(parse_device(config.devices[0]))
        folder = resolve_model(config.model)
        model = ModelConfig.load(folder)
        self._inbox: Inbox[Op] = Inbox()
        self._executor = make_executor(config, model)
        try:
            self._build(config, model, folder)
        except BaseException:
            self._executor.close()
            raise

    def _build(self, config: EngineConfig, model: ModelConfig, folder: Path) -> None:
        """What needs the pool."""
        self._executor.listen(self._inbox.poke)
        blocks = BlockManager(self._executor.num_blocks, config.block_size)
        self._bounds = Bounds.of(config, model, blocks.num_blocks)
        epoch, model_hash = new_epoch(), model_fingerprint(folder)
        self._layout = make_layout(config, model, model_hash, self._executor.kv_cache)
        in_pieces = config.role == "prefill" and config.prefill_chunk_tokens is not None
        self.identity: dict[str, Any] = {
            "instance": config.instance,
            "role": config.role,
            "epoch": epoch,
            "model_hash": model_hash,
            "layout": self._layout.to_wire(),
            "max_context": self._bounds.max_context,
            "block_size": config.block_size,
            "blocks_total": blocks.num_blocks,
            "max_batch_size": config.max_batch_size,
            "max_batch_tokens": config.max_batch_tokens,
            "pieces_above": config.max_batch_tokens if in_pieces else None,
            "attention": self._executor.attention,
            "pid": os.getpid(),
        }
        self._role = make_role(config, blocks, self._executor, self._layout, epoch, self._inbox)
        self._loop = EngineLoop(self._role, self._executor, self._inbox, self._clock)

    def stop(self, reason: str) -> None:
        """Ends `run` after the current step. From any thread or a signal handler."""
        self._inbox.stop(reason)

    def run(self, sock: socket.socket, flush_s: float) -> str:
        """Serves the stub at the other end of `sock` until it is gone or `stop`; returns the reason.

        Raises what makes the engine unable to go on.
        """
        mailbox = Mailbox(
            FrameConnection(sock),
            self._inbox,
            Admission(self._bounds, self._layout if self._config.role == "decode" else None),
            self._status,
            self._loop.load(),
            epoch=self.identity["epoch"],
            max_queue=self._config.max_queue,
            heartbeat_s=self._config.heartbeat_s,
            owner_timeout_s=OWNER_PATIENCE * self._config.lease_s,
            batch_tokens=self._config.max_batch_tokens,
            clock=self._clock,
        )
        mailbox.start()
        try:
            return self._loop.run(mailbox)
        finally:
            mailbox.close(flush_s)
            self._role.close()
            self._executor.close()

    def _status(self, load: Load, step_times: bool) -> dict[str, Any]:
        fields = status_fields(self.identity, load, self._loop.counters, self._started_s, self._clock())
        if step_times:
            fields["step_times"] = self._loop.step_times.to_wire()
        return fields | self._role.details()


def new_epoch() -> int:
    """53 bits: milliseconds since 1970, so that a later start has a higher epoch, and 12 random bits."""
    return (int(time.time() * 1000) << 12 | secrets.randbits(12)) & ((1 << 53) - 1)
