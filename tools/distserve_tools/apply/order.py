"""In which order instances come and go, so that both phases are served all the while."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distserve_tools.apply.instances import Change, Instances, overlap


@dataclass(frozen=True)
class Step:
    """Bring an instance up, or let one go. `beside`: live instances whose devices it shares meanwhile."""

    action: Literal["add", "remove"]
    name: str
    beside: tuple[str, ...] = ()

    def __str__(self) -> str:
        shared = f" (beside {', '.join(self.beside)} on the same devices)" if self.beside else ""
        return f"{self.action} {self.name}{shared}"


def ordered(change: Change, share: bool = False) -> list[Step]:
    """The steps from `change.live` to `change.wanted`.

    An instance comes as soon as its devices are free of those that go. Else one that goes makes room, if the
    rest still serves both phases. Else, as when the only prefill and the only decode instance change places,
    the new one is loaded beside the old one, which needs memory for both until that has drained. With `share`
    (devices that may be shared) it is always loaded beside, one at a time: an old prefill instance drains
    only as fast as decode takes its prompts over, and the new instance may be what decode lacks.
    """
    now = dict(change.live)
    adds, removes = list(change.add), list(change.remove)
    steps: list[Step] = []

    def remove(name: str) -> None:
        steps.append(Step("remove", name))
        removes.remove(name)
        del now[name]

    while adds:
        free = next((name for name in adds if not _in_the_way(change, now, removes, name)), None)
        if free is None and not share:
            leaves = _makes_room(change, now, adds, removes)
            if leaves is not None:
                remove(leaves)
                continue
        free = free or _to_squeeze_in(change, now, adds)
        beside = tuple(_in_the_way(change, now, removes, free))
        steps.append(Step("add", free, beside))
        adds.remove(free)
        now[free] = change.wanted[free]
        for name in beside if share else ():
            if serves_both({n: e for n, e in now.items() if n != name}):
                remove(name)
    return steps + [Step("remove", name) for name in removes]


def serves_both(instances: Instances) -> bool:
    """Whether requests can be served to their end by the roles that they were planned for."""
    roles = {engine.config.role for engine in instances.values()}
    return "unified" in roles or {"prefill", "decode"} <= roles


def _in_the_way(change: Change, now: Instances, removes: list[str], name: str) -> list[str]:
    return [r for r in removes if r in now and overlap(now[r], change.wanted[name])]


def _makes_room(change: Change, now: Instances, adds: list[str], removes: list[str]) -> str | None:
    """The instance to let go first: one that blocks the least number of others from its successor's place."""
    options = []
    for name in removes:
        rest = {n: e for n, e in now.items() if n != name}
        blocked = [a for a in adds if overlap(now[name], change.wanted[a])]
        if blocked and (serves_both(rest) or not serves_both(now)):
            waits_for = min(len(_in_the_way(change, now, removes, a)) for a in blocked)
            options.append((waits_for, removes.index(name), name))
    return min(options)[2] if options else None


def _to_squeeze_in(change: Change, now: Instances, adds: list[str]) -> str:
    """What lets the others go: an instance with which both phases would be served without those that go."""
    kept = {name: engine for name, engine in now.items() if name in change.wanted}
    return next((a for a in adds if serves_both({**kept, a: change.wanted[a]})), adds[0])
