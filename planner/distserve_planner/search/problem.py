"""What is searched: model, cluster, requests, objectives, and the assumptions that decide the winner."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from distserve.core.model_config import ModelConfig
from distserve.core.order import Order, Ordering
from distserve.core.parsing import ConfigError
from distserve.core.scheduler import Limits
from distserve.core.shapes import Shape
from distserve_planner.cluster import Cluster, Link
from distserve_planner.goodput import Precision, Requests
from distserve_planner.latency import LatencyModel
from distserve_planner.memory import MemoryRule, kv_tokens
from distserve_planner.simulator.spec import InstanceSpec
from distserve_planner.slo import Slo

Family = Literal["high", "low", "prefill_first", "chunked_prefill"]
FAMILIES: tuple[Family, ...] = ("high", "low", "prefill_first", "chunked_prefill")
FREE = Link(1e30)


@dataclass(frozen=True)
class Assumptions:
    """Switches that move the winner. Defaults are what the engine of this repository does.

    hop: activations between pipeline stages cost the links' time (`network`) or nothing (`free`).
    transfer: likewise for KV between instances.
    reserve: room that decode assures a request at admission: its prompt alone (and preempts when memory runs
    out), the expected output on top, or the most it may generate (`max_tokens`).
    tp: degrees to try: divisors of the heads, powers of two among them, or any that the engine can split.
    max_tokens: what clients allow; default: exactly what each request generates.
    chunk_tokens: budgets to try for chunked prefill.
    batch_tokens: `Lm`; default: from the latency model, per tp.
    order, ageing_tokens_per_s: of waiting prompts, in front of the instances and at them (see
    `distserve.core.order.Ordering`).
    prefill_chunk_tokens: pieces in which prefill instances compute prompts above `Lm`; default: whole.
    """

    hop: Literal["network", "free"] = "network"
    transfer: Literal["network", "free"] = "network"
    reserve: Literal["prompt", "expected", "max"] = "prompt"
    tp: Literal["divisors", "powers_of_two", "all"] = "divisors"
    max_tokens: int | None = None
    max_batch_size: int = 512
    batch_tokens: int | None = None
    chunk_tokens: tuple[int, ...] = (256, 512, 1024)
    block_size: int = 16
    order: Order = "fcfs"
    ageing_tokens_per_s: float = 1000.0
    prefill_chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "block_size", "prefill_chunk_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        self.ordering()
        if not self.chunk_tokens:
            raise ConfigError("chunk_tokens=[]: at least one budget is needed")

    def ordering(self) -> Ordering:
        """Of waiting prompts. Raises `ConfigError`."""
        return Ordering(self.order, self.ageing_tokens_per_s)


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything that an evaluation needs; sent once to each worker process.

    unified_latency: times of the engine that the colocated baselines stand for; default: the same.
    long_precision: for the candidates that decide; saturation of KV memory shows only in long runs.
    """

    latency: LatencyModel
    cluster: Cluster
    requests: Requests
    slo: Slo
    assumptions: Assumptions = field(default_factory=Assumptions)
    precision: Precision = field(default_factory=Precision)
    long_precision: Precision = field(default_factory=lambda: Precision(4000, 20_000, 4000, patient=True))
    memory: MemoryRule = field(default_factory=MemoryRule)
    unified_latency: LatencyModel | None = None
    families: tuple[Family, ...] = FAMILIES
    unified_shape: Shape | None = None  # the baselines' given parallelism; default: the best

    @property
    def phase_precision(self) -> Precision:
        """For phases by themselves, which only bound and size: half the requests, a grid twice as wide."""
        own = self.precision
        return replace(
            own,
            min_requests=max(1, own.min_requests // 2),
            max_requests=max(1, own.max_requests // 2),
            step=2 * own.step,
        )

    @property
    def model(self) -> ModelConfig:
        return self.latency.model

    def kv_tokens(self, shape: Shape) -> int:
        """Tokens of KV in an instance of `shape`; 0 if the weights do not fit."""
        return kv_tokens(
            self.model, shape.tp, shape.pp, self.latency.dtype, self.cluster.device_memory_bytes, self.memory
        )

    def instance(
        self,
        shape: Shape,
        *,
        cross_hops: int = 0,
        unified: bool = False,
        chunk_tokens: int | None = None,
    ) -> InstanceSpec:
        """An instance; `cross_hops` of its pp - 1 hops go from one node to another."""
        source = self.unified_latency if unified and self.unified_latency is not None else self.latency
        latency = source.instance(shape.tp, shape.pp, stage_link=self._stage_link(shape, cross_hops))
        rules = self.assumptions
        limits = Limits(
            max_batch_size=rules.max_batch_size,
            max_batch_tokens=rules.batch_tokens or latency.lm_tokens,
            chunk_tokens=chunk_tokens or rules.chunk_tokens[0],
            reserve_tokens=self.reserve_tokens,
            prefill_chunk_tokens=rules.prefill_chunk_tokens,
        )
        blocks = self.kv_tokens(shape) // rules.block_size
        return InstanceSpec(latency, blocks, limits, rules.block_size, rules.ordering())

    @property
    def reserve_tokens(self) -> int | None:
        """`Limits.reserve_tokens` of the assumption."""
        rule = self.assumptions.reserve
        if rule == "max":
            return None
        return 0 if rule == "prompt" else round(self.requests.mean_output)

    def _stage_link(self, shape: Shape, cross_hops: int) -> Link | None:
        """One link that stands for all hops: their mean latency and mean time per byte."""
        hops = shape.pp - 1
        if not hops:
            return None
        if self.assumptions.hop == "free":
            return FREE
        intra, inter = self.cluster.intra, self.cluster.inter
        share = cross_hops / hops
        per_byte = share / inter.bandwidth_bytes_s + (1 - share) / intra.bandwidth_bytes_s
        return Link(1 / per_byte, share * inter.latency_s + (1 - share) * intra.latency_s)
