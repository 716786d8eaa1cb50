"""What there is to try: shapes that the model, the cluster and the memory allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape, head_range, query_head_range
from distserve_planner.memory import GIB, fewest_devices, weight_bytes_per_device
from distserve_planner.search.assignment import assign, cross_hops
from distserve_planner.search.deployment import Deployment, Group
from distserve_planner.search.problem import Problem
from distserve_planner.search.tasks import PhaseTask


@dataclass(frozen=True)
class Shapes:
    """Shapes with room for KV, and why the others have none."""

    fitting: tuple[Shape, ...]
    without_memory: tuple[tuple[Shape, str], ...]


def tp_degrees(model: ModelConfig, most: int, rule: str) -> tuple[int, ...]:
    """Degrees up to `most` devices of one node, by the assumption `tp`."""
    found = []
    for tp in range(1, most + 1):
        try:
            head_range(model.num_kv_heads, tp, 0)
            query_head_range(model.num_heads, model.num_kv_heads, tp, 0)
        except ConfigError:
            continue
        divides = model.num_heads % tp == 0
        if rule == "all" or (divides and (rule == "divisors" or tp & (tp - 1) == 0)):
            found.append(tp)
    return tuple(found)


def pp_degrees(model: ModelConfig, most: int) -> tuple[int, ...]:
    """Divisors of the layers, as in the authors' search."""
    return tuple(pp for pp in range(1, min(most, model.num_layers) + 1) if model.num_layers % pp == 0)


def shapes(problem: Problem) -> Shapes:
    """All shapes on the cluster. Raises `ConfigError` if the model fits nowhere."""
    cluster, model = problem.cluster, problem.model
    fitting, without = [], []
    widest = max(node.devices for node in cluster.nodes)
    for tp in tp_degrees(model, widest, problem.assumptions.tp):
        for pp in pp_degrees(model, cluster.num_devices // tp):
            shape = Shape(tp, pp)
            if problem.kv_tokens(shape) >= problem.assumptions.block_size:
                fitting.append(shape)
            else:
                need = weight_bytes_per_device(model, tp, pp, problem.latency.dtype)
                without.append((shape, f"weights take {need / GIB:.1f} GiB of a device's {_memory(problem)}"))
    if not fitting:
        least = fewest_devices(model, problem.latency.dtype, cluster.device_memory_bytes, problem.memory)
        raise ConfigError(
            f"cluster={cluster.name!r}: {cluster.num_devices} devices of {_memory(problem)} cannot hold "
            f"{problem.latency.model_name}; its weights alone need {least} or more. Add devices, or take a "
            "smaller dtype"
        )
    return Shapes(tuple(fitting), tuple(without))


def _memory(problem: Problem) -> str:
    return f"{problem.cluster.device_memory_bytes / GIB:.0f} GiB"


def high_hops(problem: Problem, shape: Shape) -> int:
    """Hops over the network when the instance lies on as few nodes as possible."""
    return cross_hops(shape, problem.cluster.devices_per_node)


def pairs(problem: Problem, fitting: Sequence[Shape]) -> list[Deployment]:
    """One unit of Algorithm 2 for each inter_op and each pair of segments that a node can hold."""
    found = []
    for segments in range(1, problem.cluster.num_nodes + 1):
        whole = [shape for shape in fitting if shape.pp % segments == 0]
        for prefill, decode in product(whole, whole):
            if (prefill.ranks + decode.ranks) // segments > max(n.devices for n in problem.cluster.nodes):
                continue
            unit = Deployment("low", Group(prefill, 1, segments), Group(decode, 1, segments))
            if assign(unit, problem.cluster) is not None:
                found.append(unit)
    return found


def unified_units(problem: Problem, fitting: Sequence[Shape]) -> list[Deployment]:
    """One instance of each shape, per policy asked for."""
    given = problem.unified_shape
    found = []
    for shape in fitting:
        if given is not None and shape != given:
            continue
        if "prefill_first" in problem.families:
            found.append(Deployment("prefill_first", unified=Group(shape)))
        if "chunked_prefill" in problem.families:
            found += [
                Deployment("chunked_prefill", unified=Group(shape), chunk_tokens=chunk)
                for chunk in problem.assumptions.chunk_tokens
            ]
    return [unit for unit in found if assign(unit, problem.cluster) is not None]


def phase_tasks(problem: Problem, fitting: Sequence[Shape], units: Sequence[Deployment]) -> list[PhaseTask]:
    """Phases to size alone: for Algorithm 1 each shape, for Algorithm 2 what its pairs need."""
    tasks: dict[PhaseTask, None] = {}
    if "high" in problem.families:
        for shape in fitting:
            for role in ("prefill", "decode"):
                tasks[PhaseTask(role, shape, high_hops(problem, shape))] = None
    for unit in units:
        tasks.update(dict.fromkeys(tasks_of_pair(unit)))
    return list(tasks)


def tasks_of_pair(unit: Deployment) -> tuple[PhaseTask, PhaseTask]:
    """The phases of a unit of Algorithm 2."""
    prefill, decode = unit.prefill, unit.decode
    assert prefill is not None
    assert decode is not None
    hops = prefill.segments - 1
    return PhaseTask("prefill", prefill.shape, hops), PhaseTask("decode", decode.shape, hops)
