"""Brings back what Triton never does: models whose stub process died, and a server that died or hangs.

A dead stub is cured only by a full reload of its model, and Triton reloads fully only if the configuration
changed. So the model is loaded again with a parameter that counts restarts. The stub may have died with a
lock in its hand that the server needs: Triton 24.10 then ends (`boost::interprocess::lock_exception`) or
waits for ever, and all of it is started again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distserve_planner.placement_check import ORCHESTRATOR
from distserve_tools.launch import ServerStartError, TritonServer, http_ok
from distserve_tools.model_control import ModelControl, ModelControlError
from distserve_tools.processes import ProcessId, descendants

_STUB = "triton_python_backend_stub"
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_STABLE_S = 120.0
_LIVE_CHECK_S = 2.0
_HUNG_S = 60.0
MAX_SERVER_STARTS = 6
"""In succession, none of which lasted: then the supervisor gives up."""
STARTS_WITH_ALL = 2
"""Of these: then models that do not load any more, perhaps for want of their device, are done without."""


@dataclass
class _BackOff:
    """What dies again at once is given longer and longer pauses."""

    restarts: int = 0
    in_succession: int = 0
    pause_s: float = 0.0
    not_before_s: float = 0.0
    began_s: float | None = None  # when the last restart was done, or had failed

    def due(self, now: float) -> bool:
        """If it is: another restart begins."""
        if now < self.not_before_s:
            return False
        stable = self.began_s is None or now - self.began_s > _STABLE_S
        self.in_succession = 1 if stable else self.in_succession + 1
        self.pause_s = min(_FIRST_PAUSE_S * 2 ** (self.in_succession - 1), _LONGEST_PAUSE_S)
        self.not_before_s = now + self.pause_s
        self.restarts += 1
        return True


@dataclass
class _Liveness:
    """Whether the server answers; asked now and then."""

    asked_s: float = 0.0
    heard_s: float = field(default_factory=time.monotonic)


class Supervisor:
    """Watches one server and its stubs from a thread of its own, between `start` and `stop`.

    `on_event` gets a line for people. `after_load` is called after the model of that name was loaded again,
    and for the orchestrator after the server was started again. `given_up` says why nothing is tried any
    more. `hung_s`: without any answer of a server that lives, it is killed.
    """

    def __init__(
        self,
        server: TritonServer,
        on_event: Callable[[str], None],
        after_load: Callable[[str], None] = lambda model: None,
        interval_s: float = 0.5,
        load_timeout_s: float = 300.0,
        hung_s: float = _HUNG_S,
    ) -> None:
        self.given_up: str | None = None
        self._server = server
        self._on_event = on_event
        self._after_load = after_load
        self._interval_s = interval_s
        self._load_timeout_s = load_timeout_s
        self._hung_s = hung_s
        self._watched: dict[str, _BackOff] = {}
        self._server_starts = _BackOff()
        self._liveness = _Liveness()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        self._watch_repository()
        self.check()
        self._thread.start()

    def stop(self) -> None:
        """Ends the watching. A load or start in progress ends with the server, so it is not waited for."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self._interval_s + 1.0)

    @property
    def restarts(self) -> Mapping[str, int]:
        """How often each model was loaded again."""
        return {name: watched.restarts for name, watched in self._watched.items()}

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s) and self.given_up is None:
            try:
                if not self._server.alive():
                    self._revive()
                elif self._answers():
                    self.check()
            except Exception as error:  # whatever it is, the watching goes on
                self._on_event(f"supervisor: {error!r}")

    def _watch_repository(self) -> None:
        """A stub may have died before it was seen."""
        for path in self._server.repository.glob("*/*/model.py"):
            self._watched.setdefault(path.parent.parent.name, _BackOff())

    def check(self) -> list[str]:
        """One look: loads every model again whose stub is gone; returns their names."""
        self._server.note_processes()
        running = stubs_by_model(self._server.pid)
        for name in running:
            self._watched.setdefault(name, _BackOff())
        gone = [name for name in self._watched if name not in running]
        return [name for name in gone if self._bring_back(name, self._watched[name])]

    def _bring_back(self, name: str, watched: _BackOff) -> bool:
        now, server = time.monotonic(), self._server
        control = ModelControl(server.http_url, server.access, self._load_timeout_s)
        if now < watched.not_before_s or self._stop.is_set() or not server.alive():
            return False
        try:
            if control.state(name) != "READY":
                del self._watched[name]  # unloaded on purpose
                return False
            if not watched.due(now):
                return False
            self._on_event(f"{name}: its stub process died; loading the model again")
            control.reload(server.repository, name, watched.restarts)
            self._after_load(name)
        except Exception as error:
            watched.began_s = time.monotonic()
            if not self._stop.is_set() and server.alive():
                self._on_event(f"{name}: {error}; trying again in {watched.pause_s:.0f} s")
                if isinstance(error, ModelControlError) and error.silent:
                    self._kill("neither loads the model nor refuses to")
            return False
        watched.began_s = time.monotonic()
        self._on_event(f"{name}: loaded again ({watched.began_s - now:.1f} s)")
        return True

    def _answers(self) -> bool:
        """Whether the server has answered lately; one that has not for long is killed."""
        now = time.monotonic()
        if now - self._liveness.asked_s < _LIVE_CHECK_S:
            return self._liveness.heard_s >= self._liveness.asked_s
        self._liveness.asked_s = now
        if http_ok(self._server.http_url, "/v2/health/live", _LIVE_CHECK_S):
            self._liveness.heard_s = time.monotonic()
        elif now - self._liveness.heard_s > self._hung_s:
            self._kill(f"has not answered for {self._hung_s:.0f} s")
        return self._liveness.heard_s >= now

    def _kill(self, why: str) -> None:
        if not self._stop.is_set():
            self._on_event(f"tritonserver {why}; killing it")
            self._server.kill()

    def _revive(self) -> None:
        starts, server = self._server_starts, self._server
        now = time.monotonic()
        if self._stop.is_set() or not starts.due(now):
            return
        ended = f"tritonserver ended with code {server.exit_code}"
        if starts.in_succession > MAX_SERVER_STARTS:
            self.given_up = f"{ended}, {MAX_SERVER_STARTS} times in succession; log: {server.log_path}"
            return
        self._on_event(f"{ended}; starting it again (log: {server.log_path})")
        try:
            server.revive(with_what_loads=starts.in_succession > STARTS_WITH_ALL)
        except ServerStartError as error:
            starts.began_s = time.monotonic()
            if not self._stop.is_set():
                self._on_event(f"tritonserver: {error}; trying again in {starts.pause_s:.0f} s")
            return
        self._liveness = _Liveness()
        starts.began_s = time.monotonic()
        self._watch_repository()
        try:
            self._after_load(ORCHESTRATOR)
        except Exception as error:  # the models are up: requests will show
            self._on_event(f"{ORCHESTRATOR}: {error}")
        self._on_event(f"tritonserver: started again ({starts.began_s - now:.1f} s)")


def stubs_by_model(server_pid: int) -> dict[str, set[ProcessId]]:
    """The live stub processes below a server, by the name of their model."""
    found: dict[str, set[ProcessId]] = {}
    for process in descendants(server_pid):
        try:
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if len(words) > 1 and Path(words[0].decode(errors="replace")).name == _STUB:
            # .../REPOSITORY/MODEL/VERSION/model.py
            model = Path(words[1].decode(errors="replace")).parent.parent.name
            if process.alive():
                found.setdefault(model, set()).add(process)
    return found
