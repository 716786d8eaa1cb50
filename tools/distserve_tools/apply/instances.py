"""Which instances stay, which come and which go, and under which names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distserve.core.config import EngineConfig
from distserve.core.parsing import ConfigError, to_mapping
from distserve_planner.device_names import parse_device
from distserve_planner.placement_file import LIMITS, InstancePlan, NodePlan, Placement

_OF_THE_MODEL = ("model", "dtype", "block_size", "transfer_secret_file")


@dataclass(frozen=True)
class Placed:
    """An engine, and the node whose server has its model."""

    config: EngineConfig
    node: NodePlan


Instances = Mapping[str, Placed]
"""By instance name."""


@dataclass(frozen=True)
class Change:
    """From what is live to what is wanted. `keep` is a part of both."""

    live: Instances
    wanted: Instances

    @property
    def keep(self) -> frozenset[str]:
        return frozenset(self.live) & frozenset(self.wanted)

    @property
    def add(self) -> tuple[str, ...]:
        return tuple(name for name in self.wanted if name not in self.live)

    @property
    def remove(self) -> tuple[str, ...]:
        return tuple(name for name in self.live if name not in self.wanted)


def placed_engines(placement: Placement) -> list[Placed]:
    """In the order of the file. Raises `ConfigError`."""
    return [
        Placed(placement.engine_config(index), placement.node_of(instance))
        for index, instance in enumerate(placement.instances)
    ]


def change_to(live: Instances, placement: Placement) -> Change:
    """What has to change for the live instances to be those of `placement`.

    An instance that is live already, whatever its name, stays under the name that it has. One that differs in
    anything else from all live ones comes as a new model beside them: under its own name if no live instance
    has that, or under the role's next free one, since a name stands for one model until that has drained.
    Raises `ConfigError` if the placement is of another model than what is live.
    """
    engines = placed_engines(placement)
    _check_same_model(live, engines)
    names: list[str | None] = [None] * len(engines)
    left = dict(live)
    for exact in (True, False):  # first those that have kept their name too
        for index, engine in enumerate(engines):
            if names[index] is None:
                own = engine.config.instance
                same = (n for n, other in left.items() if _alike(other, engine) and (n == own or not exact))
                names[index] = next(same, None)
                left.pop(names[index] or "", None)
    taken = set(live) | {name for name in names if name is not None}
    wanted: dict[str, Placed] = {}
    for engine, known in zip(engines, names, strict=True):
        name = known or _free_name(engine.config, taken)
        taken.add(name)
        wanted[name] = replace(engine, config=replace(engine.config, instance=name))
    return Change(live, wanted)


def named(placement: Placement, names: Sequence[str]) -> Placement:
    """The placement with these names written out, where they are not the default ones."""
    plain = replace(placement, instances=tuple(replace(i, name=None) for i in placement.instances))
    instances = tuple(
        instance if name == default else replace(instance, name=name)
        for instance, name, default in zip(plain.instances, names, plain.names, strict=True)
    )
    return replace(placement, instances=instances)


def instance_plan(engine: Placed) -> InstancePlan:
    """The entry of a placement file that gives this engine."""
    config = engine.config
    values = to_mapping(config)
    limits = {key: value for key, value in values.items() if key in LIMITS}
    return InstancePlan(
        config.role,
        config.devices,
        config.instance,
        engine.node.name,
        tp=config.tp,
        pp=config.pp,
        limits=limits,
    )


def overlap(one: Placed, other: Placed) -> bool:
    """Whether two instances share a device."""
    if one.node.host != other.node.host:
        return False
    mine, theirs = ([parse_device(name) for name in e.config.devices] for e in (one, other))
    return any(len(a.overlap(b)) > 0 for a in mine for b in theirs)


def _alike(one: Placed, other: Placed) -> bool:
    same = replace(one.config, instance="") == replace(other.config, instance="")
    return same and one.node.name == other.node.name


def _free_name(config: EngineConfig, taken: set[str]) -> str:
    if config.instance not in taken:
        return config.instance
    return next(name for i in range(len(taken) + 1) if (name := f"{config.role}_{i}") not in taken)


def _check_same_model(live: Instances, engines: Sequence[Placed]) -> None:
    for name, present in live.items():
        for engine in engines:
            for field in _OF_THE_MODEL:
                old, new = getattr(present.config, field), getattr(engine.config, field)
                if old != new:
                    raise ConfigError(
                        f"{field}={new!r}: {name} runs with {old!r}; instances of one server pass KV to each "
                        f"other, so {field} changes only with a restart of the server"
                    )
