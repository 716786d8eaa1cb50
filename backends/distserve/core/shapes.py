"""Which layers and heads live on which rank. Pure arithmetic, shared by models, transfer and planner.

A rank of an instance with (tp, pp) is `pp_rank * tp + tp_rank`.
"""

from __future__ import annotations

from dataclasses import dataclass

from distserve.core.parsing import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """Degrees of parallelism of one instance."""

    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1:
            raise ConfigError(f"tp={self.tp}, pp={self.pp}: both must be at least 1")

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    def rank(self, pp_rank: int, tp_rank: int) -> int:
        return pp_rank * self.tp + tp_rank

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(pp_rank, tp_rank) of a rank."""
        return divmod(rank, self.tp)


def split_range(total: int, parts: int, index: int) -> range:
    """Contiguous, as even as possible; the first `total % parts` parts get one more."""
    if not 0 <= index < parts:
        raise ConfigError(f"part {index} of {parts}: the index must be in [0, {parts})")
    size, extra = divmod(total, parts)
    start = index * size + min(index, extra)
    return range(start, start + size + (1 if index < extra else 0))


def layer_range(num_layers: int, pp: int, pp_rank: int) -> range:
    """Layers of a pipeline stage. Raises `ConfigError` if a stage would be empty."""
    if pp > num_layers:
        raise ConfigError(f"pp={pp}: the model has {num_layers} layers; allowed: 1 to {num_layers}")
    return split_range(num_layers, pp, pp_rank)


def head_range(num_kv_heads: int, tp: int, tp_rank: int) -> range:
    """KV heads of a tensor-parallel rank: an uneven split, or one replicated head if tp > num_kv_heads.

    With replication tp must be a multiple of num_kv_heads, so that every head is held equally often.
    """
    if tp <= num_kv_heads:
        return split_range(num_kv_heads, tp, tp_rank)
    if tp % num_kv_heads:
        raise ConfigError(
            f"tp={tp}: with {num_kv_heads} KV heads allowed are 1 to {num_kv_heads} "
            f"and multiples of {num_kv_heads}"
        )
    head = tp_rank // (tp // num_kv_heads)
    return range(head, head + 1)


def query_head_range(num_heads: int, num_kv_heads: int, tp: int, tp_rank: int) -> range:
    """Query heads of a rank: those that read its KV heads; a replicated KV head's queries are divided."""
    group = num_heads // num_kv_heads
    if tp <= num_kv_heads:
        kv = split_range(num_kv_heads, tp, tp_rank)
        return range(kv.start * group, kv.stop * group)
    copies = tp // num_kv_heads
    if group < copies:
        raise ConfigError(f"tp={tp}: more ranks than the model's {num_heads} query heads")
    head = head_range(num_kv_heads, tp, tp_rank).start
    part = split_range(group, copies, tp_rank % copies)
    return range(head * group + part.start, head * group + part.stop)
