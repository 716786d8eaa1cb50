"""Which rank of a decode instance gets which layers and heads from which rank of a prefill instance. Pure
arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from distserve.core.shapes import Shape, head_range, layer_range

__all__ = ["Shape", "Slice", "callers", "contacts", "plan"]


@dataclass(frozen=True, slots=True)
class Slice:
    """KV of `layers` x `heads` (numbered over the whole model) that `dst_rank` gets from `src_rank`."""

    src_rank: int
    dst_rank: int
    layers: range
    heads: range


def plan(src: Shape, dst: Shape, num_layers: int, num_kv_heads: int) -> list[Slice]:
    """Slices that bring every (layer, head) of every destination rank exactly once, ordered by destination
    rank.

    A head that several source ranks hold (more ranks than KV heads) is taken from one of them, in turns over
    the destination ranks that want it. Raises `ConfigError` where `layer_range` or `head_range` refuses a
    shape.
    """
    holders = _holders(src, num_kv_heads)
    wanted = _holders(dst, num_kv_heads)
    slices = []
    for dst_rank in range(dst.ranks):
        pp_rank, tp_rank = dst.coordinates(dst_rank)
        heads = head_range(num_kv_heads, dst.tp, tp_rank)
        layers = layer_range(num_layers, dst.pp, pp_rank)
        sources = {head: holders[head][wanted[head].index(tp_rank) % len(holders[head])] for head in heads}
        for src_pp in range(src.pp):
            held = layer_range(num_layers, src.pp, src_pp)
            common = range(max(layers.start, held.start), min(layers.stop, held.stop))
            if not common:
                continue
            for src_tp, group in groupby(heads, key=sources.__getitem__):
                run = list(group)
                slices.append(Slice(src.rank(src_pp, src_tp), dst_rank, common, range(run[0], run[-1] + 1)))
    return slices


def contacts(src: Shape, dst: Shape, num_layers: int, num_kv_heads: int) -> dict[int, dict[int, list[Slice]]]:
    """For each destination rank: the source ranks it calls, with the slices it takes there.

    A source rank that gives nothing (its heads are taken from a replica) is called all the same, by one
    destination rank and with no slices: otherwise it would never learn that its blocks are free.
    """
    calls: dict[int, dict[int, list[Slice]]] = {rank: {} for rank in range(dst.ranks)}
    for piece in plan(src, dst, num_layers, num_kv_heads):
        calls[piece.dst_rank].setdefault(piece.src_rank, []).append(piece)
    used = {rank for by_source in calls.values() for rank in by_source}
    for rank in range(src.ranks):
        if rank not in used:
            calls[rank % dst.ranks][rank] = []
    return calls


def callers(calls: dict[int, dict[int, list[Slice]]], src_rank: int) -> frozenset[int]:
    """Destination ranks that call `src_rank`, from the result of `contacts`; never empty."""
    return frozenset(dst_rank for dst_rank, by_source in calls.items() if src_rank in by_source)


def _holders(shape: Shape, num_kv_heads: int) -> dict[int, list[int]]:
    """The tensor-parallel ranks that hold each head."""
    holders: dict[int, list[int]] = {head: [] for head in range(num_kv_heads)}
    for tp_rank in range(shape.tp):
        for head in head_range(num_kv_heads, shape.tp, tp_rank):
            holders[head].append(tp_rank)
    return holders
