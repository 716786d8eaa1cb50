"""The latency model of one model on one kind of device: coefficients per tp, measured or predicted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from distserve.core.config import DTYPE_BYTES
from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError
from distserve.core.shapes import head_range
from distserve_planner.cluster import Link
from distserve_planner.coefficients import DecodePiece, Degree, HeadCost, PrefillPiece
from distserve_planner.instance_latency import InstanceLatency, Overhead
from distserve_planner.predict import predict_degree

__all__ = [
    "DecodePiece", "Degree", "HeadCost", "InstanceLatency", "LatencyModel", "Overhead", "PrefillPiece",
    "allreduce_s",
]  # fmt: skip


@dataclass(frozen=True)
class LatencyModel:
    """What the simulator needs to time instances of `model` on `device` in `dtype`.

    `degrees` are the fitted ones; others are predicted on demand and marked. `lm_tokens` is the shortest
    prompt that reaches 95 % of the best prefill tokens/s, for tp = 1 (or the smallest tp that was fitted).
    """

    model_name: str
    model: ModelConfig
    device: str
    dtype: str
    degrees: tuple[Degree, ...]
    overhead: Overhead = field(default_factory=Overhead)
    lm_tokens: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if not self.degrees:
            raise ConfigError("degrees=[]: coefficients of at least one tp are needed")
        measured = [d.tp for d in self.degrees]
        if len(set(measured)) != len(measured):
            raise ConfigError(f"degrees: tp={measured} names one degree twice")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype={self.dtype!r}: one of {', '.join(DTYPE_BYTES)}")

    @property
    def measured_tp(self) -> tuple[int, ...]:
        """Degrees whose coefficients were fitted for both phases."""
        return tuple(sorted(d.tp for d in self.degrees if d.prefill and d.decode and not d.predicted))

    def degree(self, tp: int) -> Degree:
        """Coefficients of `tp`; what was not fitted is predicted from what was (`predicted=True`).

        Raises `ConfigError` if the model's heads cannot be divided among `tp` devices.
        """
        head_range(self.model.num_kv_heads, tp, 0)
        for degree in self.degrees:
            if degree.tp == tp and degree.prefill and degree.decode:
                return degree
        return predict_degree(self.degrees, tp)

    def instance(
        self, tp: int, pp: int = 1, *, stage_link: Link | None = None, hop_copies: int = 1
    ) -> InstanceLatency:
        """Times of an instance. `stage_link` joins neighbouring stages (needed for pp > 1).

        hop_copies: how many of the tp ranks send the whole activation over that link; 1 if each sends its
        share and the receivers gather (Megatron-LM's scatter/gather), tp if every rank sends all of it.
        """
        degree = self.degree(tp)
        return InstanceLatency(
            degree,
            pp=pp,
            num_layers=self.model.num_layers,
            overhead=self.overhead,
            hop_bytes_per_token=self.model.hidden_size * DTYPE_BYTES[self.dtype] * hop_copies,
            stage_link=stage_link,
            kv_bytes_per_token=self.model.kv_bytes_per_token(self.dtype),
            lm_tokens=self.lm_tokens_for(tp),
        )

    def lm_tokens_for(self, tp: int) -> int:
        """`Lm` of a degree: the profile's own for the smallest degree, else derived from coefficients."""
        if self.lm_tokens is not None and tp == min(d.tp for d in self.degrees):
            return self.lm_tokens
        return saturating_length(self.degree(tp), self.overhead, self.model.max_context)

    def with_overhead(self, overhead: Overhead) -> LatencyModel:
        """The same coefficients under other overheads."""
        return replace(self, overhead=overhead)


def saturating_length(degree: Degree, overhead: Overhead, max_context: int) -> int:
    """`Lm`: shortest single prompt within 95 % of the best prefill tokens/s up to `max_context`.

    Multiples of 16 tokens (one block). Paper, section 3.1 and 4.3.
    """
    lengths = list(range(16, max(16, max_context) + 1, 16))

    def rate(length: int) -> float:
        over = overhead.iteration_s + overhead.per_context_token_s * length + overhead.prefill_stage_s
        return length / (degree.prefill_seconds(length, length * length, 1) + over)

    rates = [rate(length) for length in lengths]
    best = max(rates)
    return next(length for length, value in zip(lengths, rates, strict=True) if value >= 0.95 * best)


def allreduce_s(size_bytes: float, tp: int, link: Link) -> float:
    """Ring all-reduce among tp devices: latency + 2 (tp - 1) / tp x bytes / bandwidth; 0 for tp = 1."""
    if tp == 1:
        return 0.0
    return link.latency_s + 2 * (tp - 1) / tp * size_bytes / link.bandwidth_bytes_s
