"""Which instances stay, which come and which go, and under which names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distserve.core.config import EngineConfig
from distserve.core.parsing import ConfigError, to_mapping
from distserve_planner.device_names import parse_device
from distserve_planner.placement_file import LIMITS, InstancePlan, Placement

_OF_THE_MODEL = ("model", "dtype", "block_size", "transfer_secret_file")


@dataclass(frozen=True)
class Change:
    """From what is live to what is wanted; engines by instance name. `keep` is a part of both."""

    live: Mapping[str, EngineConfig]
    wanted: Mapping[str, EngineConfig]

    @property
    def keep(self) -> frozenset[str]:
        return frozenset(self.live) & frozenset(self.wanted)

    @property
    def add(self) -> tuple[str, ...]:
        return tuple(name for name in self.wanted if name not in self.live)

    @property
    def remove(self) -> tuple[str, ...]:
        return tuple(name for name in self.live if name not in self.wanted)


def change_to(live: Mapping[str, EngineConfig], placement: Placement) -> Change:
    """What has to change for the live instances to be those of `placement`.

    An instance that is live already, whatever its name, stays under the name that it has. One that differs in
    anything else from all live ones comes as a new model beside them: under its own name if no live instance
    has that, or under the role's next free one, since a name stands for one model until that has drained.
    Raises `ConfigError` if the placement is of another model than what is live.
    """
    configs = [placement.engine_config(index) for index in range(len(placement.instances))]
    _check_same_model(live, configs)
    names: list[str | None] = [None] * len(configs)
    left = dict(live)
    for exact in (True, False):  # first those that have kept their name too
        for index, config in enumerate(configs):
            if names[index] is None:
                same = (
                    n for n, c in left.items() if _alike(c, config) and (n == config.instance or not exact)
                )
                names[index] = next(same, None)
                left.pop(names[index] or "", None)
    taken = set(live) | {name for name in names if name is not None}
    wanted: dict[str, EngineConfig] = {}
    for config, known in zip(configs, names, strict=True):
        name = known or _free_name(config, taken)
        taken.add(name)
        wanted[name] = replace(config, instance=name)
    return Change(live, wanted)


def named(placement: Placement, names: Sequence[str]) -> Placement:
    """The placement with these names written out, where they are not the default ones."""
    plain = replace(placement, instances=tuple(replace(i, name=None) for i in placement.instances))
    instances = tuple(
        instance if name == default else replace(instance, name=name)
        for instance, name, default in zip(plain.instances, names, plain.names, strict=True)
    )
    return replace(placement, instances=instances)


def instance_plan(config: EngineConfig) -> InstancePlan:
    """The entry of a placement file that gives this engine."""
    values = to_mapping(config)
    limits = {key: value for key, value in values.items() if key in LIMITS}
    return InstancePlan(
        config.role, config.devices, config.instance, tp=config.tp, pp=config.pp, limits=limits
    )


def overlap(one: EngineConfig, other: EngineConfig) -> bool:
    """Whether two instances share a device."""
    mine, theirs = ([parse_device(name) for name in c.devices] for c in (one, other))
    return any(len(a.overlap(b)) > 0 for a in mine for b in theirs)


def _alike(one: EngineConfig, other: EngineConfig) -> bool:
    return replace(one, instance="") == replace(other, instance="")


def _free_name(config: EngineConfig, taken: set[str]) -> str:
    if config.instance not in taken:
        return config.instance
    return next(name for i in range(len(taken) + 1) if (name := f"{config.role}_{i}") not in taken)


def _check_same_model(live: Mapping[str, EngineConfig], configs: Sequence[EngineConfig]) -> None:
    for name, present in live.items():
        for config in configs:
            for field in _OF_THE_MODEL:
                old, new = getattr(present, field), getattr(config, field)
                if old != new:
                    raise ConfigError(
                        f"{field}={new!r}: {name} runs with {old!r}; instances of one server pass KV to each "
                        f"other, so {field} changes only with a restart of the server"
                    )
