"""Is a change worth it: what both placements would do over a time ahead, and what the change costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from distserve.core.parsing import ConfigError
from distserve_planner.search.deployment import Deployment, Group
from distserve_planner.watch.choose import common_part


@dataclass(frozen=True)
class SwitchRule:
    """When to change.

    horizon_s: how long a new placement is expected to stand. margin: by how much attainment must rise.
    headroom_up: the rate that a placement is chosen for, over the expected one. headroom_down: the rate that
    a smaller placement must bear, over the expected one; the gap between the two keeps a load near a
    boundary from switching back and forth. settle_s: no reduction within this time of the last change.
    load_s: weights of one instance. drain_s: the longest requests that run on.
    """

    horizon_s: float = 1800.0
    margin: float = 0.02
    headroom_up: float = 0.1
    headroom_down: float = 0.3
    settle_s: float = 600.0
    load_s: float = 30.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("horizon_s", "settle_s", "load_s", "drain_s", "margin", "headroom_up"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be 0 or more")
        if self.headroom_down <= self.headroom_up:
            raise ConfigError(
                f"headroom_down={self.headroom_down}: must be above headroom_up={self.headroom_up}, or a "
                "steady load would be followed up and down"
            )


@dataclass(frozen=True)
class Switch:
    """What a change takes. during: what serves meanwhile; None: nothing is missing. devices: extra ones."""

    seconds: float
    during: Deployment | None
    extra_devices: int


def switch_cost(present: Deployment, wanted: Deployment, devices: int, rule: SwitchRule) -> Switch:
    """Instances of the same role and shape stay; the others are turned over one after the other.

    With enough free devices among `devices` the new ones are loaded before the old ones drain, all at once.
    Otherwise one instance at a time gives its devices up: meanwhile the present placement lacks one of a
    role that shrinks (or, if it is the only one of its role, lacks none: it is loaded beside).
    """
    stay = common_part(present.groups, wanted.groups)
    new = sum(g.devices for _, g in wanted.groups) - sum(
        stay.get(role, 0) * g.shape.ranks for role, g in wanted.groups if _same_shape(present, role, g)
    )
    gone = {role: group.count - stay[role] for role, group in present.groups}
    if new == 0:
        return Switch(0.0, None, 0)
    if new <= devices - present.devices:
        return Switch(rule.load_s, None, new)
    lacking = [(role, group) for role, group in present.groups if gone[role] and group.count > 1]
    rounds = max(1, sum(gone.values()))
    seconds = rounds * (rule.drain_s + rule.load_s)
    if not lacking:
        return Switch(seconds, None, 0)
    role, group = max(lacking, key=lambda item: gone[item[0]])
    less = replace(group, count=group.count - 1)
    return Switch(seconds, _with(present, role, less), 0)


def _same_shape(present: Deployment, role: str, group: Group) -> bool:
    return any(r == role and g.shape == group.shape for r, g in present.groups)


def _with(deployment: Deployment, role: str, group: Group) -> Deployment:
    if role == "prefill":
        return replace(deployment, prefill=group)
    return replace(deployment, decode=group) if role == "decode" else replace(deployment, unified=group)


@dataclass(frozen=True)
class Comparison:
    """Both placements on the latest workload. Shares of requests that meet both objectives.

    target: attainment wanted. present, wanted: at the expected rate with `headroom_up`; wanted_down: the new
    one at `headroom_down`, where it has fewer devices. during: while the change goes on.
    """

    target: float
    present: float
    wanted: float
    during: float
    present_devices: int
    wanted_devices: int
    switch: Switch
    since_change_s: float
    wanted_down: float | None = None

    def with_change(self, rule: SwitchRule) -> float:
        """Attainment over the horizon if it is changed now."""
        share = min(1.0, self.switch.seconds / rule.horizon_s) if rule.horizon_s else 1.0
        return share * self.during + (1 - share) * self.wanted


@dataclass(frozen=True)
class Decision:
    """retry_s: when to look again even if nothing drifts; None: not before it does."""

    change: bool
    reason: str
    retry_s: float | None = None


def decide(seen: Comparison, rule: SwitchRule) -> Decision:
    """Change if that repairs attainment, or saves devices without spoiling it. See `SwitchRule`."""
    ahead = seen.with_change(rule)
    gain = ahead - seen.present
    percent = f"{100 * seen.present:.1f} % now, {100 * ahead:.1f} % with the change and its cost"
    if seen.present < seen.target:
        if gain >= rule.margin:
            return Decision(True, f"attainment is below {100 * seen.target:g} %: {percent}")
        return Decision(
            False, f"below the target, but nothing better by {100 * rule.margin:g} points: {percent}"
        )
    fewer = seen.present_devices - seen.wanted_devices
    if fewer <= 0:
        return Decision(False, f"the present placement meets the target: {percent}")
    down = seen.wanted if seen.wanted_down is None else seen.wanted_down
    if down < seen.target or ahead < seen.target:
        return Decision(False, f"{fewer} devices fewer would leave too little room: {percent}")
    saved = fewer * (rule.horizon_s - seen.switch.seconds)
    paid = seen.switch.extra_devices * seen.switch.seconds
    if saved <= paid:
        return Decision(False, f"saves {saved:.0f} device-seconds within the horizon and costs {paid:.0f}")
    wait_s = rule.settle_s - seen.since_change_s
    if wait_s > 0:
        return Decision(
            False, f"{fewer} devices could go, {wait_s:.0f} s after the last change", float(ceil(wait_s))
        )
    return Decision(True, f"{fewer} devices fewer meet the target: {percent}")
