"""What is simulated: instances, their limits, and the routes that KV takes between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distserve.core.config import Policy
from distserve.core.order import Ordering
from distserve.core.parsing import ConfigError
from distserve.core.scheduler import Limits
from distserve_planner.instance_latency import InstanceLatency
from distserve_planner.simulator.rounds import DecodeRounds


@dataclass(frozen=True)
class InstanceSpec:
    """One instance: its times, its KV pool and the limits of its scheduler."""

    latency: InstanceLatency
    num_blocks: int
    limits: Limits
    block_size: int = 16
    ordering: Ordering = field(default_factory=Ordering)  # of prompts that wait at a prefill instance
    rounds: DecodeRounds = field(init=False, repr=False, compare=False)  # tabulated once for all simulations

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", DecodeRounds(self.latency))
        if self.num_blocks < 1:
            raise ConfigError(f"num_blocks={self.num_blocks}: an instance needs at least 1 block of KV")

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class Route:
    """The way of KV from one prefill to one decode instance.

    A transfer occupies all of `ports` (a node's network card in one direction, an instance's end of NVLink)
    until it is done; each port serves transfers one after the other, first come first served.
    """

    ports: tuple[int, ...] = ()
    latency_s: float = 0.0
    s_per_token: float = 0.0


@dataclass(frozen=True)
class SystemSpec:
    """A deployment. One of three forms:

    `prefill` and `decode` (disaggregated; `routes` gives the way for each pair of indices, a missing pair
    moves in no time; `targets` gives the decode instances that a prefill instance may send to, default all),
    `unified` with its `policy`, or only one of `prefill` and `decode`: that phase alone,
    as `simu_prefill` and `simu_decode` of Algorithm 1. `ordering`: of the queue in front of all instances.
    """

    prefill: tuple[InstanceSpec, ...] = ()
    decode: tuple[InstanceSpec, ...] = ()
    unified: tuple[InstanceSpec, ...] = ()
    policy: Policy = "prefill_first"
    routes: Mapping[tuple[int, int], Route] = field(default_factory=dict)
    targets: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    ordering: Ordering = field(default_factory=Ordering)

    def __post_init__(self) -> None:
        if bool(self.unified) == bool(self.prefill or self.decode):
            raise ConfigError("a system has either unified instances, or prefill and decode ones")

    @property
    def instances(self) -> tuple[InstanceSpec, ...]:
        return self.prefill + self.decode + self.unified
