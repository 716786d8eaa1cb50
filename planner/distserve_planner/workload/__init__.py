"""Workloads: traces, their statistics, fitted arrival processes and length distributions, resampling."""

from distserve_planner.workload.arrivals import Arrivals
from distserve_planner.workload.lengths import JointLengths, Quantiles
from distserve_planner.workload.model import Workload
from distserve_planner.workload.named import named_workload, workload_names
from distserve_planner.workload.trace import Trace, TraceError

__all__ = [
    "Arrivals",
    "JointLengths",
    "Quantiles",
    "Trace",
    "TraceError",
    "Workload",
    "named_workload",
    "workload_names",
]
