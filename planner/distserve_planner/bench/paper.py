"""The paper's evaluation: testbed, objectives (Table 1), chosen placements (Table 3)."""

from __future__ import annotations

from dataclasses import dataclass

from distserve.core.shapes import Shape
from distserve_planner.cluster import Cluster, Link
from distserve_planner.devices import latency_model
from distserve_planner.goodput import Precision, Requests
from distserve_planner.memory import GIB, MemoryRule
from distserve_planner.search.deployment import Deployment, Group
from distserve_planner.search.problem import Assumptions, Family, Problem
from distserve_planner.slo import Slo
from distserve_planner.workload import named_workload

REQUESTS = 60_000
NVLINK = Link(300e9, 1e-5)
NETWORK = Link(25e9 / 8, 1e-5)  # 25 Gbps between nodes (section 6.1)


@dataclass(frozen=True)
class PaperCase:
    """One row: model, workload, objectives in seconds, and the parallelism that the paper chose.

    segments: nodes over which each instance is spread (the pipeline of OPT-175B crosses three).
    """

    name: str
    model: str
    workload: str
    ttft_s: float
    tpot_s: float
    prefill: Shape
    decode: Shape
    segments: int = 1

    @property
    def unit(self) -> Deployment:
        """The paper's placement, one of it."""
        return Deployment("low", Group(self.prefill, 1, self.segments), Group(self.decode, 1, self.segments))


# Table 1 and Table 3. The artifact plots OPT-66B ShareGPT with 0.4 / 0.1 instead of Table 1's 2.5 / 0.15.
CASES = (
    PaperCase("13B ShareGPT", "opt-13b", "sharegpt", 0.25, 0.1, Shape(2, 1), Shape(1, 1)),
    PaperCase("66B ShareGPT", "opt-66b", "sharegpt", 2.5, 0.15, Shape(4, 1), Shape(2, 2)),
    PaperCase("66B ShareGPT (artifact)", "opt-66b", "sharegpt", 0.4, 0.1, Shape(4, 1), Shape(2, 2)),
    PaperCase("66B LongBench", "opt-66b", "longbench", 15.0, 0.15, Shape(4, 1), Shape(2, 2)),
    PaperCase("66B HumanEval", "opt-66b", "humaneval", 0.125, 0.2, Shape(4, 1), Shape(2, 2)),
    PaperCase("175B ShareGPT", "opt-175b", "sharegpt", 4.0, 0.2, Shape(3, 3), Shape(4, 3), 3),
)


def case_problem(
    case: PaperCase,
    *,
    families: tuple[Family, ...] = ("low",),
    assumptions: Assumptions | None = None,
    nodes: int = 4,
    network: Link = NETWORK,
    quick: bool = False,
    output_scale: float = 1.0,
) -> Problem:
    """A row on 4 nodes of 8 A100-80G, with the authors' coefficients and reserve rule.

    output_scale: answers that many times as long. Colocated baselines run on the authors' vLLM coefficients.
    """
    trace = named_workload(case.workload).resample(0, 1.0, REQUESTS)
    if output_scale != 1.0:
        outputs = (trace.output_tokens * output_scale).round().astype("int64").clip(min=1)
        trace = type(trace)(trace.arrival_s, trace.input_tokens, outputs, trace.name)
    cluster = Cluster.uniform(
        nodes, 8, device="a100-80g", device_memory_bytes=80 * GIB, intra=NVLINK, inter=network
    )
    return Problem(
        latency_model("a100-80g", case.model),
        cluster,
        Requests(trace),
        Slo(case.ttft_s, case.tpot_s),
        assumptions or Assumptions(),
        Precision(500, 2000, 500) if quick else Precision(),
        Precision(2000, 6000, 2000, patient=True) if quick else Precision(4000, 20_000, 4000, patient=True),
        MemoryRule.simdistserve(),
        latency_model("a100-80g-vllm", case.model),
        families,
    )
