"""The parent's side of a worker: starts it, asks it, and ends it."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

WORKER = Path(__file__).with_name("worker.py")


class WorkerError(RuntimeError):
    """A worker ended or did not answer in time; the message has the end of what it printed."""


@dataclass(frozen=True)
class WorkerSpec:
    """One engine on one model. `context` tokens per prompt; `room` more are decoded at most."""

    engine: str
    model: str
    dtype: str
    cores: tuple[int, ...]
    context: int
    room: int
    sequences: int
    vocab: int


class EngineWorker:
    """A running worker; use it as a context manager."""

    def __init__(self, spec: WorkerSpec, python: str, log: Path, start_timeout_s: float) -> None:
        """Starts the process and waits until it has loaded the model. Raises `WorkerError`."""
        self._log = log
        self._name = spec.engine
        read, write = os.pipe()
        self._replies = os.fdopen(read, "rb", buffering=0)
        self._pending = b""
        request = json.dumps({**vars(spec), "reply_fd": write})
        environment = os.environ | {"OMP_NUM_THREADS": str(len(spec.cores)), "PYTHONWARNINGS": "ignore"}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [python, str(WORKER), request],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(write,),
                env=environment,
            )
        os.close(write)
        try:
            self.about: str = self._read(start_timeout_s)["about"]
        except BaseException:
            self.close(patience_s=0)
            raise

    def ask(self, timeout_s: float, **request: object) -> list[dict[str, float]]:
        """Sends one request and returns its timings. Raises `WorkerError`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._failure("has ended")) from None
        timings: list[dict[str, float]] = self._read(timeout_s)
        return timings

    def close(self, patience_s: float = 10) -> None:
        """Ends the process: it does so by itself when its stdin ends, else by force after `patience_s`."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._replies.close()

    def __enter__(self) -> EngineWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WorkerError(self._failure(f"did not answer within {timeout_s:.0f} s"))
                piece = self._replies.read(65536)
                if not piece:
                    raise WorkerError(self._failure("has ended"))
                self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def _failure(self, what: str) -> str:
        return f"{self._name} {what}; its output ends with:\n{self._log.read_text(errors='replace')[-2000:]}"
