"""Candidates: how many instances of which shape, and how they lie on nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distserve.core.config import Policy, Role
from distserve.core.shapes import Shape
from distserve_planner.search.problem import Family


@dataclass(frozen=True, order=True)
class Group:
    """`count` equal instances, each cut into `segments` pieces of as many stages, one piece a node."""

    shape: Shape
    count: int = 1
    segments: int = 1

    @property
    def devices(self) -> int:
        return self.count * self.shape.ranks

    def __str__(self) -> str:
        return f"{self.count} x (tp {self.shape.tp}, pp {self.shape.pp})"


@dataclass(frozen=True)
class Deployment:
    """Prefill and decode groups, or a unified one.

    paired (Algorithm 2): prefill instance i sends its KV to decode instance i only, stage by stage on the
    same nodes.
    """

    family: Family
    prefill: Group | None = None
    decode: Group | None = None
    unified: Group | None = None
    chunk_tokens: int | None = None

    @property
    def paired(self) -> bool:
        return self.family == "low"

    @property
    def policy(self) -> Policy:
        return "chunked_prefill" if self.family == "chunked_prefill" else "prefill_first"

    @property
    def groups(self) -> tuple[tuple[Role, Group], ...]:
        named: tuple[tuple[Role, Group | None], ...] = (
            ("prefill", self.prefill),
            ("decode", self.decode),
            ("unified", self.unified),
        )
        return tuple((role, group) for role, group in named if group is not None)

    @property
    def devices(self) -> int:
        return sum(group.devices for _, group in self.groups)

    @property
    def units(self) -> int:
        """How many pairs, or colocated instances."""
        group = self.unified or self.prefill
        return 0 if group is None else group.count

    def with_units(self, count: int) -> Deployment:
        """`count` pairs or colocated instances: every group has as many instances."""

        def as_many(group: Group | None) -> Group | None:
            return None if group is None else replace(group, count=count)

        return replace(
            self, prefill=as_many(self.prefill), decode=as_many(self.decode), unified=as_many(self.unified)
        )

    def with_counts(self, prefill: int, decode: int) -> Deployment:
        """The same shapes in other numbers."""
        assert self.prefill is not None
        assert self.decode is not None
        return replace(
            self, prefill=replace(self.prefill, count=prefill), decode=replace(self.decode, count=decode)
        )

    def __str__(self) -> str:
        parts = [
            f"{group.count} {role} (tp {group.shape.tp}, pp {group.shape.pp})" for role, group in self.groups
        ]
        chunk = f", chunk {self.chunk_tokens}" if self.family == "chunked_prefill" else ""
        return f"{LABELS[self.family]}: {' + '.join(parts)}{chunk}"


LABELS = {
    "high": "DistServe-High",
    "low": "DistServe-Low",
    "prefill_first": "unified prefill_first",
    "chunked_prefill": "unified chunked_prefill",
}
