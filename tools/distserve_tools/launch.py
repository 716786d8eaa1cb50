"""Starts one tritonserver on a model repository, starts it again when it dies, ends it without a trace."""

from __future__ import annotations

import contextlib
import http.client
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from distserve.serving.launch_environment import SERVER_RESTARTS
from distserve_planner.placement_check import ORCHESTRATOR
from distserve_tools import die_with_parent, server_log
from distserve_tools.access_files import access_of, left_for_tools
from distserve_tools.client import Client, RequestError
from distserve_tools.leftovers import Leftovers
from distserve_tools.model_control import ModelControl, ModelControlError, restricted
from distserve_tools.processes import free_ports, port_is_free
from distserve_tools.server_files import Installation, find_installation, server_environment
from distserve_tools.shared_regions import SharedRegions

_START_TRIES = 3
_HANG_S = 30.0
_LOG = logging.getLogger(__name__)
_SIGN_OF_LIFE_S = 10.0
_CONTROL_S = 5.0
_KILL_S = 10.0
# of the region that Triton and a stub share, at the start: one that grows under load has crashed a stub
_STUB_SHM_BYTES = 16 << 20

Progress = Callable[[Mapping[str, str]], None]
"""Called with the state of each model ("loading", "ready") whenever one changes, and every ten seconds."""


class ServerStartError(RuntimeError):
    """The server did not become ready. The message has its first error lines and where its log is."""


class _StartHangs(ServerStartError):
    """A model's own part is done, and Triton does not notice. Seen with 24.10 on machines with much to do."""


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
    """A running tritonserver; a context manager. It ends with this process, however that ends."""

    def __init__(self, options: ServerOptions, progress: Progress | None = None) -> None:
        self._options = options
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        # the server gets SIGTERM when the thread that spawned it ends: this one lives until `stop`
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="tritonserver")
        self._lock = threading.Lock()  # of a spawn against `stop`
        self._stopping = threading.Event()
        self._own_log: Path | None = None
        self._log_start = 0  # bytes of the log that are of servers before this one
        self._regions = SharedRegions()
        self._leftovers = Leftovers(self._regions)
        self.ports = Ports(0, 0, 0)
        self.log_path = options.log_path or Path()
        self.restarts = 0
        self._with_what_loads = False
        self._left = contextlib.ExitStack()  # for tools of the same user
        self.access = access_of(options.repository)

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
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + options.start_timeout_s
        try:
            self._regions.claim()
        except OSError as error:
            raise ServerStartError(f"{error.filename}: {error.strerror}; Triton needs /dev/shm") from None
        try:
            for tries_left in reversed(range(_START_TRIES)):
                self.ports = self._choose_ports()
                self.log_path.write_bytes(b"")
                self._spawn(installation)
                try:
                    self._wait_ready(deadline, _HANG_S if tries_left else math.inf)
                    break
                except ServerStartError as error:
                    self._own_log = None  # keep it for the reader
                    if not tries_left or not self._may_start_again(error):
                        raise
            self._left.enter_context(left_for_tools(self.grpc_url, self.access))
        except BaseException:
            self.stop()
            raise

    def _may_start_again(self, error: ServerStartError) -> bool:
        """After a start that came to nothing through no fault of the models."""
        hangs = isinstance(error, _StartHangs)
        if hangs:
            _LOG.warning("%s; starting tritonserver again", error)
            self.kill()
        elif not server_log.port_was_taken(self.log_path) or self._fixed_ports():
            return False
        self._end()
        return True

    def revive(self, with_what_loads: bool = False) -> None:
        """Starts a server that has died again, on its ports, when what it left behind is gone.

        `with_what_loads`: models that fail to load are done without, else they fail the start. Raises
        `ServerStartError`, also if `stop` is called meanwhile; it may be tried again.
        """
        process = self._process
        if process is None:
            raise ServerStartError("the server is being stopped")
        self._leftovers.clear(process.pid)
        self.restarts += 1
        self._log_start = self.log_path.stat().st_size
        self._with_what_loads = with_what_loads
        self._spawn(find_installation(self._options.tritonserver))
        try:
            self._wait_ready(time.monotonic() + self._options.start_timeout_s, _HANG_S)
        except ServerStartError:
            self.kill()
            raise

    def kill(self) -> None:
        """Of a server that does not answer any more: it is dead afterwards."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait(_KILL_S)

    @property
    def exit_code(self) -> int | None:
        """`None` while it lives."""
        return self._process.poll() if self._process is not None else None

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def note_processes(self) -> None:
        """Remembers the processes of this server that live now, so that `stop` can end stragglers."""
        if self._process is not None:
            self._leftovers.note(self._process.pid)

    def stop(self) -> int | None:
        """Lets requests in flight finish (up to `drain_timeout_s`), ends all processes, frees shared memory.

        Returns the server's exit code, `None` if it never ran. A second call does nothing.
        """
        with self._lock:
            self._stopping.set()
        code = self._end()
        self._regions.release()
        self._left.close()
        self._spawner.shutdown(wait=False)
        if self._own_log is not None and code == 0:
            shutil.rmtree(self._own_log, ignore_errors=True)
            self._own_log = None
        return code

    def _end(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        self._leftovers.note(process.pid)
        if process.poll() is None:
            self._drain()
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(self._options.drain_timeout_s + _KILL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_KILL_S)
        self._leftovers.clear(process.pid)
        return process.returncode

    def _drain(self) -> None:
        """Has the orchestrator end its requests and part from its instances.

        Triton's own shutdown unloads all models at once, the instances below running requests included.
        """
        drain_s = self._options.drain_timeout_s
        try:
            control = ModelControl(self.http_url, self.access, _CONTROL_S)
            if control.state(ORCHESTRATOR) == "READY":
                with Client(self.grpc_url, access=self.access) as client:
                    client.control("stop", timeout_s=drain_s + _CONTROL_S, drain_s=drain_s)
        except (ModelControlError, RequestError):
            pass  # dead or hung: then it can only be ended

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
        with self._lock:
            if self._stopping.is_set():
                raise ServerStartError("the server is being stopped")
            self._process = self._spawner.submit(self._popen, installation).result()

    def _popen(self, installation: Installation) -> subprocess.Popen[bytes]:
        base = {**os.environ, **self._options.environment, **self.access.environment}
        base[SERVER_RESTARTS] = str(self.restarts)
        guard = [sys.executable, die_with_parent.__file__, str(os.getpid())]
        with self.log_path.open("ab") as log:  # appended to, so that a reader may empty it
            return subprocess.Popen(
                [*guard, *self.command(installation)],
                env=server_environment(installation, base),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=self._regions.inherited,
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
            f"--backend-config=python,shm-region-prefix-name={self._regions.prefix}",
            f"--backend-config=python,shm-default-byte-size={_STUB_SHM_BYTES}",
            f"--exit-timeout-secs={max(1, round(options.drain_timeout_s))}",
            f"--http-address={options.host}",
            f"--http-port={self.ports.http}",
            f"--grpc-address={options.host}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={options.host}",
            f"--metrics-port={self.ports.metrics}",
            *restricted(self.access),
            *(["--exit-on-error=false", "--strict-readiness=false"] if self._with_what_loads else []),
        ]

    def _wait_ready(self, deadline: float, hang_s: float) -> None:
        """`hang_s`: from the moment at which a model is ready by its own account until Triton says so."""
        states: dict[str, str] = {}
        done_s: dict[str, float] = {}
        reported_s = time.monotonic()
        while True:
            process = self._process
            if process is None or self._stopping.is_set():
                raise ServerStartError("the server is being stopped")
            found = server_log.model_states(self.log_path, self._log_start)
            if found != states or time.monotonic() - reported_s > _SIGN_OF_LIFE_S:
                states, reported_s = found, time.monotonic()
                if self._progress is not None:
                    self._progress(states)
            if process.poll() is not None:
                raise ServerStartError(f"tritonserver ended with code {process.returncode}\n{self._reason()}")
            # the metrics service starts last, and its failure ends a server that was ready
            if http_ok(self.http_url, "/v2/health/ready") and http_ok(self.metrics_url, "/metrics"):
                self.note_processes()
                return
            self._check_hang(found, done_s, hang_s)
            if time.monotonic() > deadline:
                waiting = ", ".join(n for n, s in states.items() if s != "ready") or "none began to load"
                raise ServerStartError(
                    f"not ready after {self._options.start_timeout_s:g} s; still loading: {waiting}\n"
                    f"{self._reason()}"
                )
            time.sleep(0.1)

    def _check_hang(self, states: Mapping[str, str], done_s: dict[str, float], hang_s: float) -> None:
        now = time.monotonic()
        for model in server_log.engines_ready(self.log_path, self._log_start):
            if states.get(model) == "loading" and now - done_s.setdefault(model, now) > hang_s:
                text = f"{model} has been ready for {hang_s:.0f} s, and Triton does not load it"
                raise _StartHangs(f"{text}\n{self._reason()}")

    def _reason(self) -> str:
        lines = server_log.first_errors(self.log_path, self._log_start)
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
