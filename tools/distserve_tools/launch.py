"""Starts one tritonserver on a model repository, waits until it is ready, and ends it without a trace."""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from distserve_planner.placement_check import ORCHESTRATOR
from distserve_tools import die_with_parent, server_log
from distserve_tools.client import Client, RequestError
from distserve_tools.model_control import ModelControlError, model_state
from distserve_tools.processes import (
    ProcessId,
    descendants,
    free_ports,
    port_is_free,
    session_members,
    wait_gone,
)
from distserve_tools.server_files import Installation, find_installation, server_environment

_SHM = Path("/dev/shm")
_PORT_TRIES = 3
_SIGN_OF_LIFE_S = 10.0
_CONTROL_S = 5.0

Progress = Callable[[Mapping[str, str]], None]
"""Called with the state of each model ("loading", "ready") whenever one changes, and every ten seconds."""


class ServerStartError(RuntimeError):
    """The server did not become ready. The message has its first error lines and where its log is."""


@dataclass(frozen=True)
class ServerOptions:
    """How to run a server. A port of 0 is any free one; times in seconds."""

    repository: Path
    host: str = "127.0.0.1"
    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int = 0
    tritonserver: str | None = None  # program; default: see `find_installation`
    log_path: Path | None = None  # default: a temporary file, removed after a clean stop
    start_timeout_s: float = 300.0
    drain_timeout_s: float = 10.0  # on stop: for requests in flight
    thread_pool_size: int = 128  # of each model's stub; must exceed its calls and sends in flight
    environment: Mapping[str, str] = field(default_factory=dict)  # on top of this process's


@dataclass(frozen=True)
class Ports:
    http: int
    grpc: int
    metrics: int


class TritonServer:
    """A running tritonserver; a context manager.

    It gets SIGTERM when the thread that started it ends, so start it from a thread that outlives it.
    """

    def __init__(self, options: ServerOptions, progress: Progress | None = None) -> None:
        self._options = options
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: set[ProcessId] = set()
        self._own_log: Path | None = None
        self._prefix = f"distserve_{os.getpid()}_{secrets.token_hex(4)}_"
        self.ports = Ports(0, 0, 0)
        self.log_path = options.log_path or Path()

    @property
    def repository(self) -> Path:
        return self._options.repository

    @property
    def http_url(self) -> str:
        """`host:port`, as `tritonclient.http` takes it."""
        return f"{self._client_host}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        return f"{self._client_host}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        return f"{self._client_host}:{self.ports.metrics}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def _client_host(self) -> str:
        return "127.0.0.1" if self._options.host == "0.0.0.0" else self._options.host

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns once every model is ready. Raises `ServerStartError` or `ServerNotFoundError`."""
        options = self._options
        if not options.repository.is_dir():
            raise ServerStartError(f"model repository {options.repository}: no such folder")
        installation = find_installation(options.tritonserver)
        if options.log_path is None:
            self._own_log = Path(tempfile.mkdtemp(prefix="distserve-"))
            self.log_path = self._own_log / "tritonserver.log"
        deadline = time.monotonic() + options.start_timeout_s
        for attempt in range(_PORT_TRIES):
            self.ports = self._choose_ports()
            self._spawn(installation)
            try:
                self._wait_ready(deadline)
                return
            except ServerStartError:
                self._own_log = None  # keep it for the reader
                taken = server_log.port_was_taken(self.log_path)
                self.stop()
                if not taken or attempt + 1 == _PORT_TRIES or self._fixed_ports():
                    raise
            except BaseException:
                self.stop()
                raise

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def note_processes(self) -> None:
        """Remembers the processes of this server that live now, so that `stop` can end stragglers."""
        if self._process is not None:
            self._seen |= descendants(self._process.pid) | session_members(self._process.pid)

    def stop(self) -> int | None:
        """Lets requests in flight finish (up to `drain_timeout_s`), ends all processes, frees shared memory.

        Returns the server's exit code, `None` if it never ran. A second call does nothing.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        self._seen |= descendants(process.pid) | session_members(process.pid)
        if process.poll() is None:
            self._drain()
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(self._options.drain_timeout_s + 10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10.0)
        self._end_stragglers(process.pid)
        self._remove_shared_memory()
        if self._own_log is not None and process.returncode == 0:
            shutil.rmtree(self._own_log, ignore_errors=True)
            self._own_log = None
        return process.returncode

    def _drain(self) -> None:
        """Has the orchestrator end its requests and part from its instances.

        Triton's own shutdown unloads all models at once, the instances below running requests included.
        """
        drain_s = self._options.drain_timeout_s
        try:
            if model_state(self.http_url, ORCHESTRATOR, _CONTROL_S) == "READY":
                with Client(self.grpc_url) as client:
                    client.control("stop", timeout_s=drain_s + _CONTROL_S, drain_s=drain_s)
        except (ModelControlError, RequestError):
            pass  # dead or hung: then it can only be ended

    def _end_stragglers(self, session: int) -> None:
        """Engines and stubs end by themselves when the server is gone; a hung one is killed."""
        left = wait_gone(self._seen | session_members(session), 2.0)
        for straggler in left | session_members(session):
            straggler.kill()
        wait_gone(left, 5.0)
        self._seen.clear()

    def _remove_shared_memory(self) -> None:
        for path in _SHM.glob(f"{self._prefix}*"):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def _fixed_ports(self) -> bool:
        options = self._options
        return bool(options.http_port and options.grpc_port and options.metrics_port)

    def _choose_ports(self) -> Ports:
        options = self._options
        wanted = {
            "http": options.http_port,
            "grpc": options.grpc_port,
            "metrics": options.metrics_port,
        }
        for name, port in wanted.items():
            if port and not port_is_free(port, options.host):
                raise ServerStartError(
                    f"--{name}-port {port}: in use on {options.host}; give another, or 0 for any free one"
                )
        spare = iter(free_ports(len(wanted), options.host))
        return Ports(**{name: port or next(spare) for name, port in wanted.items()})

    def _spawn(self, installation: Installation) -> None:
        base = {**os.environ, **self._options.environment}
        guard = [sys.executable, die_with_parent.__file__, str(os.getpid())]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path.write_bytes(b"")
        with self.log_path.open("ab") as log:  # appended to, so that a reader may empty it
            self._process = subprocess.Popen(
                [*guard, *self.command(installation)],
                env=server_environment(installation, base),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def command(self, installation: Installation) -> list[str]:
        """The server's command line."""
        options = self._options
        return [
            str(installation.binary),
            f"--model-repository={options.repository.resolve()}",
            f"--backend-directory={installation.backends}",
            "--model-control-mode=explicit",
            "--load-model=*",
            "--disable-auto-complete-config",
            f"--backend-config=python,thread-pool-size={options.thread_pool_size}",
            f"--backend-config=python,shm-region-prefix-name={self._prefix}",
            f"--exit-timeout-secs={max(1, round(options.drain_timeout_s))}",
            f"--http-address={options.host}",
            f"--http-port={self.ports.http}",
            f"--grpc-address={options.host}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={options.host}",
            f"--metrics-port={self.ports.metrics}",
        ]

    def _wait_ready(self, deadline: float) -> None:
        states: dict[str, str] = {}
        reported_s = time.monotonic()
        while True:
            assert self._process is not None
            found = server_log.model_states(self.log_path)
            if found != states or time.monotonic() - reported_s > _SIGN_OF_LIFE_S:
                states, reported_s = found, time.monotonic()
                if self._progress is not None:
                    self._progress(states)
            if self._process.poll() is not None:
                code = self._process.returncode
                raise ServerStartError(f"tritonserver ended with code {code}\n{self._reason()}")
            # the metrics service starts last, and its failure ends a server that was ready
            if http_ok(self.http_url, "/v2/health/ready") and http_ok(self.metrics_url, "/metrics"):
                self.note_processes()
                return
            if time.monotonic() > deadline:
                waiting = ", ".join(n for n, s in states.items() if s != "ready") or "none began to load"
                raise ServerStartError(
                    f"not ready after {self._options.start_timeout_s:g} s; still loading: {waiting}\n"
                    f"{self._reason()}"
                )
            time.sleep(0.1)

    def _reason(self) -> str:
        lines = server_log.first_errors(self.log_path)
        return "\n".join([*(f"  {line}" for line in lines), f"  log: {self.log_path}"])


def http_ok(url: str, path: str, timeout_s: float = 2.0) -> bool:
    """Whether a GET of `path` at `host:port` answers 200."""
    connection = http.client.HTTPConnection(url, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
