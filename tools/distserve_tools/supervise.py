"""Brings back models whose stub process died; Triton never does, and goes on saying that they are ready.

A dead stub is cured only by a full reload of its model, and Triton reloads fully only if the configuration
changed. So the model is loaded again with a parameter that counts restarts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from distserve_tools.launch import TritonServer
from distserve_tools.model_control import model_state, reload_model
from distserve_tools.processes import ProcessId, descendants

_STUB = "triton_python_backend_stub"
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_STABLE_S = 120.0


@dataclass
class _Watched:
    restarts: int = 0
    pause_s: float = _FIRST_PAUSE_S
    not_before_s: float = 0.0
    loaded_s: float = 0.0


class Supervisor:
    """Watches the stubs of one server from a thread of its own, between `start` and `stop`.

    `on_event` gets a line for people. `after_load` is called after the model of that name was loaded again.
    """

    def __init__(
        self,
        server: TritonServer,
        on_event: Callable[[str], None],
        after_load: Callable[[str], None] = lambda model: None,
        interval_s: float = 0.5,
        load_timeout_s: float = 300.0,
    ) -> None:
        self._server = server
        self._on_event = on_event
        self._after_load = after_load
        self._interval_s = interval_s
        self._load_timeout_s = load_timeout_s
        self._watched: dict[str, _Watched] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        self.check()
        self._thread.start()

    def stop(self) -> None:
        """Ends the watching. A load in progress ends with the server, so it is not waited for."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self._interval_s + 1.0)

    @property
    def restarts(self) -> Mapping[str, int]:
        """How often each model was loaded again."""
        return {name: watched.restarts for name, watched in self._watched.items()}

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s) and self._server.alive():
            self.check()

    def check(self) -> list[str]:
        """One look: loads every model again whose stub is gone; returns their names."""
        self._server.note_processes()
        running = stubs_by_model(self._server.pid)
        for name in running:
            self._watched.setdefault(name, _Watched())
        gone = [name for name in self._watched if name not in running]
        return [name for name in gone if self._bring_back(name, self._watched[name])]

    def _bring_back(self, name: str, watched: _Watched) -> bool:
        now = time.monotonic()
        if now < watched.not_before_s or self._stop.is_set():
            return False
        # a model that dies again at once is given longer and longer pauses
        stable = now - watched.loaded_s > _STABLE_S
        watched.pause_s = _FIRST_PAUSE_S if stable else min(2 * watched.pause_s, _LONGEST_PAUSE_S)
        watched.not_before_s = now + watched.pause_s
        try:
            if model_state(self._server.http_url, name, self._load_timeout_s) != "READY":
                del self._watched[name]  # unloaded on purpose
                return False
            self._on_event(f"{name}: its stub process died; loading the model again")
            watched.restarts += 1
            server = self._server
            reload_model(server.http_url, server.repository, name, watched.restarts, self._load_timeout_s)
            watched.loaded_s = time.monotonic()
            self._after_load(name)
        except Exception as error:
            if not self._stop.is_set():
                self._on_event(f"{name}: {error}; trying again in {watched.pause_s:.0f} s")
            return False
        self._on_event(f"{name}: loaded again ({watched.loaded_s - now:.1f} s)")
        return True


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
