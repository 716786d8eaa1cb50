"""From the options of the command to what is searched."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape
from distserve_planner.cluster import Cluster, Link
from distserve_planner.devices.catalog import device_spec, latency_model
from distserve_planner.goodput import Requests
from distserve_planner.placement_file import Placement
from distserve_planner.profile_file import Profile
from distserve_planner.report.effort import Effort
from distserve_planner.search.deployment import Deployment, Group
from distserve_planner.search.problem import Assumptions, Problem
from distserve_planner.slo import Slo
from distserve_planner.workload import Workload, named_workload, workload_names
from distserve_planner.workload.readers import read_trace

GIB = 1 << 30
LOCAL = Link(1e10, 1e-5)  # between processes of one host, where a profile has no transfer of its own


def add_case_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Model, cluster, workload, objectives and assumptions. required: of those without a default."""
    case = parser.add_argument_group("case")
    case.add_argument(
        "--model", required=required, help="catalogue name such as opt-13b, a folder, or cache:NAME"
    )
    case.add_argument(
        "--device", help="device name such as a100-80g, or a profile file (default: the cluster's)"
    )
    case.add_argument("--dtype", help="default: the profile's, or the model's own")
    case.add_argument(
        "--cluster", type=Path, metavar="FILE", help="schema: cluster/1; instead of the next four"
    )
    case.add_argument("--nodes", type=int, default=1, help="%(default)s")
    case.add_argument("--devices-per-node", type=int, default=8, metavar="N", help="%(default)s")
    case.add_argument(
        "--inter-gbps", type=float, default=25.0, metavar="GBPS", help="a node's network (%(default)g)"
    )
    case.add_argument("--device-memory-gib", type=float, metavar="GIB", help="default: the device's own")
    case.add_argument(
        "--workload",
        required=required,
        help=f"{', '.join(workload_names())}, a workload file (.yaml), or a trace",
    )
    for name in ("ttft", "tpot"):
        case.add_argument(
            f"--{name}",
            type=float,
            required=required,
            metavar="S",
            help=f"{name.upper()} objective in seconds",
        )
    case.add_argument("--attainment", type=float, default=0.9, help="share that must meet both (%(default)g)")
    case.add_argument("--seed", type=int, default=0, help="of the simulated requests (%(default)s)")
    rules = parser.add_argument_group("assumptions")
    rules.add_argument(
        "--baseline", metavar="DEVICE", help="times of the colocated engine, e.g. a100-80g-vllm"
    )
    rules.add_argument(
        "--vllm-shape", metavar="TP,PP", help="vLLM's usual parallelism (default: see docs/report.md)"
    )
    rules.add_argument("--hop", choices=("network", "free"), default="network", help="cost of pipeline hops")
    rules.add_argument("--transfer", choices=("network", "free"), default="network", help="cost of moving KV")
    rules.add_argument(
        "--reserve", choices=("prompt", "expected", "max"), default="prompt", help="decode memory"
    )
    rules.add_argument("--tp-degrees", choices=("divisors", "powers_of_two", "all"), default="divisors")


def problem_of(args: argparse.Namespace, effort: Effort) -> tuple[Problem, str]:
    """The problem and the workload's name. Raises `ConfigError` naming option, value and fix."""
    cluster = _cluster(args)
    latency = latency_model(cluster.device, args.model, args.dtype)
    workload = _workload(args.workload)
    trace = workload.resample(args.seed, 1.0, effort.trace_requests)
    baseline = latency_model(args.baseline, args.model, args.dtype) if args.baseline else None
    problem = Problem(
        latency,
        cluster,
        Requests(trace),
        Slo(args.ttft, args.tpot, args.attainment),
        Assumptions(hop=args.hop, transfer=args.transfer, reserve=args.reserve, tp=args.tp_degrees),
        effort.precision,
        effort.long_precision,
        unified_latency=baseline,
    )
    return problem, workload.name


def _cluster(args: argparse.Namespace) -> Cluster:
    if args.cluster is not None:
        if args.device is not None:
            raise ConfigError(
                f"--device={args.device}: the cluster file names the device; give one of the two"
            )
        return Cluster.load(args.cluster)
    if args.device is None:
        raise ConfigError("--device: give a device (a100-80g, ...), a profile file, or --cluster FILE")
    for name in ("nodes", "devices_per_node", "inter_gbps"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')}={getattr(args, name)}: must be above 0")
    memory, intra, kind = _device(args.device)
    if args.device_memory_gib is not None:
        memory = round(args.device_memory_gib * GIB)
    if memory is None:
        raise ConfigError(
            f"--device-memory-gib: {args.device} does not say how much memory a device has; give it"
        )
    return Cluster.uniform(
        args.nodes,
        args.devices_per_node,
        device=args.device,
        device_memory_bytes=memory,
        intra=intra,
        inter=Link(args.inter_gbps * 1e9 / 8, 1e-5),
        device_kind=kind,
    )


def _device(name: str) -> tuple[int | None, Link, Any]:
    """Memory, link to a neighbour and kind, from a profile file or a known device."""
    if name.endswith((".yaml", ".yml")) or Path(name).is_file():
        profile = Profile.load(name)
        kind = "cpu" if "cpu" in profile.device.lower() else "cuda"
        return profile.device_memory_bytes, profile.transfer or LOCAL, kind
    spec = device_spec(name)
    return spec.memory_bytes, spec.intra, "cuda"


def _workload(source: str) -> Workload:
    if source in workload_names() or source.endswith((".yaml", ".yml")) or not Path(source).is_file():
        return named_workload(source)  # raises, with the nearest name
    return Workload.fit(read_trace(source))


def parse_shape(text: str, option: str) -> Shape:
    """`TP,PP`. Raises `ConfigError`."""
    parts = text.split(",")
    if len(parts) != 2 or not all(p.strip().isdigit() and int(p) > 0 for p in parts):
        raise ConfigError(f"{option}={text}: expected TP,PP, for example 4,1")
    return Shape(int(parts[0]), int(parts[1]))


def placed_deployment(placement: Placement, where: str) -> Deployment:
    """What a placement file describes, as the planner sees it. Raises `ConfigError` if it cannot say it."""
    shapes: dict[str, list[Shape]] = {}
    for instance in placement.instances:
        shapes.setdefault(instance.role, []).append(Shape(instance.tp, instance.pp))
    for role, found in shapes.items():
        if len(set(found)) > 1:
            raise ConfigError(
                f"{where}: instances: {role} instances differ in tp or pp; a report compares placements "
                "whose instances of one role are equal"
            )
    groups = {role: Group(found[0], len(found)) for role, found in shapes.items()}
    if "unified" in groups:
        if len(groups) > 1:
            raise ConfigError(
                f"{where}: instances: unified beside prefill or decode; a report takes one kind"
            )
        policies = {i.limits.get("policy", "prefill_first") for i in placement.instances}
        chunked = policies == {"chunked_prefill"}
        chunk = placement.instances[0].limits.get("chunk_tokens", 256) if chunked else None
        family = "chunked_prefill" if chunked else "prefill_first"
        return Deployment(family, unified=groups["unified"], chunk_tokens=chunk)  # type: ignore[arg-type]
    missing = [role for role in ("prefill", "decode") if role not in groups]
    if missing:
        raise ConfigError(f"{where}: instances: no {missing[0]} instance; give at least one of each phase")
    if _in_pairs(placement):
        segments = max(len(set(placement.rank_nodes(instance))) for instance in placement.instances)
        return Deployment(
            "low", replace(groups["prefill"], segments=segments), replace(groups["decode"], segments=segments)
        )
    return Deployment("high", groups["prefill"], groups["decode"])


def _in_pairs(placement: Placement) -> bool:
    """Each group of instances is one prefill and one decode instance (Algorithm 2), as is a lone pair whose
    pipelines lie on the same nodes.
    """
    instances = placement.instances
    nodes = {frozenset(node.name for node in placement.rank_nodes(instance)) for instance in instances}
    if len(instances) == 2 and len(nodes) == 1 and len(next(iter(nodes))) > 1:
        return True
    members: dict[str | None, list[str]] = {}
    for instance in instances:
        members.setdefault(instance.group, []).append(instance.role)
    return None not in members and all(sorted(roles) == ["decode", "prefill"] for roles in members.values())
