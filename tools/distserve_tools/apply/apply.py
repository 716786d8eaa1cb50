"""Carries out the steps of a change, and takes them back when one fails.

Files and models go together: before a model is loaded it is in the repository, and it leaves the repository
when it has been unloaded, so that at any moment a restart of the server brings back what was live.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from distserve.core.parsing import ConfigError
from distserve_planner.placement_file import Placement
from distserve_planner.render import render
from distserve_planner.repository_files import write_repository
from distserve_tools.apply.instances import Instances, Placed, change_to, instance_plan, named
from distserve_tools.apply.order import Step, ordered, serves_both
from distserve_tools.apply.server import Server, ServerError
from distserve_tools.repository import orchestrator_config

Say = Callable[[str], None]


class ApplyError(RuntimeError):
    """A change failed. `rolled_back`: the server and its repository are what they were before."""

    def __init__(self, message: str, rolled_back: bool) -> None:
        super().__init__(message)
        self.rolled_back = rolled_back


@dataclass(frozen=True)
class Timeouts:
    """Seconds that each part of one step may take."""

    load_s: float = 300.0
    attach_s: float = 30.0
    drain_s: float = 600.0  # the longest request that may still run, see the orchestrator's request_timeout_s
    unload_s: float = 60.0


class Applier:
    """Changes the servers of a placement's nodes. `repository` is what `planner generate` wrote: of the one
    node, or the folder with one for each, which every server must have before it. `say` gets a line for
    people per step.
    """

    def __init__(
        self, server: Server, repository: Path, placement: Placement, timeouts: Timeouts, say: Say
    ) -> None:
        over_nodes = [n for n, i in zip(placement.names, placement.instances, strict=True) if i.nodes]
        if over_nodes:
            raise ConfigError(
                f"instances: {', '.join(over_nodes)}: over several nodes, whose ranks do not come and go "
                "while they serve; generate the repositories again and restart these nodes"
            )
        self._server, self._repository, self._placement = server, repository, placement
        self._timeouts, self._say = timeouts, say
        self._live: dict[str, Placed] = {}
        self._order: list[str] = []  # of the instances' entries, so that a rolled back file is the same
        self._undo: list[tuple[str, Callable[[], None]]] = []

    def steps(self) -> list[Step]:
        """What `run` would do. Raises `ConfigError`."""
        return ordered(change_to(self._server.engines(), self._placement), self._placement.oversubscribe)

    def run(self) -> Placement:
        """Makes the server be the placement; returns that with the names that its instances got.

        Raises `ConfigError` before anything is changed, `ApplyError` after it was changed back, or not.
        """
        self._live = self._server.engines()
        change = change_to(self._live, self._placement)
        self._check(change.wanted)
        served = orchestrator_config(self._orchestrators_repository)
        known = served.instances if served is not None else ()
        self._order = list(dict.fromkeys([*(spec.name for spec in known), *self._live, *change.wanted]))
        try:
            self._tidy(change.wanted)
            for step in ordered(change, self._placement.oversubscribe):
                self._say(str(step))
                if step.action == "add":
                    self._add(step.name, change.wanted[step.name])
                else:
                    self._remove(step.name)
            final = named(self._placement, tuple(change.wanted))
            write_repository(self._repository, render(final))
        except BaseException as error:
            failures = self._roll_back()
            if not isinstance(error, Exception):
                raise
            raise _failed(error, failures) from error
        return final

    @property
    def _orchestrators_repository(self) -> Path:
        nodes = self._placement.nodes
        return self._repository / nodes[0].name if len(nodes) > 1 else self._repository

    def _check(self, wanted: Instances) -> None:
        if not serves_both(wanted):
            raise ConfigError(
                "instances: nobody would serve one of the phases; give prefill and decode, or unified"
            )
        ours = self._server.orchestrator()
        theirs = self._placement.orchestrator_config()
        for field in ours.__dataclass_fields__:
            old, new = getattr(ours, field), getattr(theirs, field)
            if field != "instances" and old != new:
                raise ConfigError(
                    f"orchestrator.{field}={new!r}: the running one has {old!r}; its settings change only "
                    "with a restart of the server"
                )

    def _tidy(self, wanted: Instances) -> None:
        """Mends what a change that was cut short has left: files, and instances that are only half there."""
        self._write()
        attached = self._server.attached()
        for name in attached:
            if name not in self._live:
                self._server.drain(name, self._timeouts.drain_s)
                self._server.detach(name)
        for name, engine in self._live.items():
            if name in wanted and not attached.get(name, False):
                self._server.attach(engine, self._timeouts.attach_s)

    def _add(self, name: str, engine: Placed) -> None:
        self._undo.append((f"remove {name}", lambda: self._forget(name, engine)))
        self._bring(name, engine)

    def _bring(self, name: str, engine: Placed) -> None:
        self._live[name] = engine
        self._write()
        if name not in self._server.engines():
            self._server.load(engine, self._timeouts.load_s)
        self._server.attach(engine, self._timeouts.attach_s)

    def _forget(self, name: str, engine: Placed) -> None:
        """Undoes `_add`, as far as that got."""
        if name in self._server.attached():
            self._server.drain(name, self._timeouts.drain_s)
            self._server.detach(name)
        if name in self._server.engines():
            self._server.unload(engine, self._timeouts.unload_s)
        self._live.pop(name, None)
        self._write()

    def _remove(self, name: str) -> None:
        engine = self._live[name]
        self._undo.append((f"bring {name} back", lambda: self._bring(name, engine)))
        if name in self._server.attached():
            self._server.drain(name, self._timeouts.drain_s)
            self._server.detach(name)
        self._server.unload(engine, self._timeouts.unload_s)
        del self._live[name]
        self._write()

    def _roll_back(self) -> list[str]:
        failures = []
        while self._undo:
            what, undo = self._undo.pop()
            self._say(f"rolling back: {what}")
            try:
                undo()
            except (ServerError, ConfigError, OSError) as error:
                failures.append(f"{what}: {error}")
        return failures

    def _write(self) -> None:
        names = sorted(self._live, key=self._order.index)
        instances = tuple(instance_plan(self._live[name]) for name in names)
        write_repository(self._repository, render(replace(self._placement, instances=instances)))


def _failed(error: Exception, failures: list[str]) -> ApplyError:
    if not failures:
        return ApplyError(f"{error}; everything is as it was before", rolled_back=True)
    left = "; ".join(failures)
    return ApplyError(f"{error}; and rolling back failed: {left}. Apply the former placement again", False)
