"""Joint distribution of input and output lengths: empirical marginals joined by a Gaussian copula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from distserve.core.parsing import ConfigError
from distserve_planner.workload.trace import Trace

# Denser towards both tails, where latency objectives are decided.
PROBABILITIES = (
    0.0, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6,
    0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.965, 0.98, 0.99, 0.995, 1.0,
)  # fmt: skip
_GRID = 4001  # points of a marginal when it is tilted
_QUADRATURE = 300  # points per axis
_CHUNK = 4096  # pairs drawn at a time, so that fewer requests are a prefix of more


@dataclass(frozen=True)
class Quantiles:
    """A marginal: lengths in tokens at rising probabilities from 0 to 1, linear in between."""

    probabilities: tuple[float, ...]
    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        p, t = self.probabilities, self.tokens
        if len(p) != len(t) or len(p) < 2:
            raise ConfigError(
                f"tokens: {len(t)} values for {len(p)} probabilities; as many are needed, 2 or more"
            )
        if p[0] != 0 or p[-1] != 1 or any(b <= a for a, b in pairwise(p)):
            raise ConfigError(f"probabilities={list(p)}: must rise from 0 to 1")
        if t[0] < 1 or any(b < a for a, b in pairwise(t)):
            raise ConfigError(f"tokens={list(t)}: must not fall, and be at least 1")

    def at(self, uniform: NDArray[np.float64]) -> NDArray[np.float64]:
        """Lengths at probabilities `uniform` [n], not rounded."""
        return np.interp(uniform, self.probabilities, self.tokens)

    @property
    def mean(self) -> float:
        """Mean of the piecewise linear quantile function."""
        p, t = np.array(self.probabilities), np.array(self.tokens)
        return float(np.sum(np.diff(p) * (t[1:] + t[:-1]) / 2))

    @property
    def variance(self) -> float:
        """Variance of the piecewise linear quantile function."""
        p, t = np.array(self.probabilities), np.array(self.tokens)
        low, high = t[:-1], t[1:]
        square = float(np.sum(np.diff(p) * (low * low + low * high + high * high) / 3))
        return square - self.mean**2

    def tilted(self, tilt: float) -> Quantiles:
        """Exponentially tilted by `tilt` (per largest length): same range, another mean.

        The density is multiplied by exp(tilt x / max), the least change (in relative entropy) that moves
        the mean; 0 changes nothing.
        """
        uniform = (np.arange(_GRID) + 0.5) / _GRID
        values = self.at(uniform)
        exponent = tilt * values / self.tokens[-1]
        weights = np.exp(exponent - exponent.max())
        reached = (np.cumsum(weights) - weights / 2) / weights.sum()
        found = np.interp(PROBABILITIES[1:-1], reached, values)
        tokens = (self.tokens[0], *(round(float(v), 1) for v in found), self.tokens[-1])
        return Quantiles(PROBABILITIES, tokens)

    @classmethod
    def fit(cls, values: NDArray[np.int64]) -> Quantiles:
        """Empirical quantiles at `PROBABILITIES`."""
        found = np.quantile(values, PROBABILITIES)
        return cls(PROBABILITIES, tuple(round(float(v), 1) for v in found))


@dataclass(frozen=True)
class JointLengths:
    """Marginals of input and output lengths, and the correlation of their normal scores.

    max_total_tokens: pairs whose sum reaches it are drawn again (the authors drop such requests: a model's
    context holds prompt and answer).
    """

    input: Quantiles
    output: Quantiles
    correlation: float = 0.0
    max_total_tokens: int | None = None

    def __post_init__(self) -> None:
        if not -1 < self.correlation < 1:
            raise ConfigError(f"correlation={self.correlation}: must be in (-1, 1)")
        limit = self.max_total_tokens
        if limit is not None and self.input.tokens[0] + self.output.tokens[0] >= limit:
            raise ConfigError(f"max_total_tokens={limit}: no pair is that short")

    def sample(
        self, generator: np.random.Generator, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`count` pairs (input, output), int64, at least 1; fewer are a prefix of more.

        Raises `ConfigError` if `max_total_tokens` leaves less than 1 % of the pairs.
        """
        kept: list[NDArray[np.int64]] = []
        have = drawn = 0
        while have < count:
            pairs = self._kept(self._pairs(generator.standard_normal((_CHUNK, 2))))
            drawn += _CHUNK
            kept.append(pairs)
            have += len(pairs)
            if have < 0.01 * drawn:
                raise ConfigError(
                    f"max_total_tokens={self.max_total_tokens}: leaves less than 1 % of the requests"
                )
        chosen = np.concatenate(kept)[:count] if kept else np.zeros((0, 2), np.int64)
        return chosen[:, 0].copy(), chosen[:, 1].copy()

    def _kept(self, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.max_total_tokens is None:
            return pairs
        kept: NDArray[np.int64] = pairs[pairs.sum(axis=1) < self.max_total_tokens]
        return kept

    def _pairs(self, scores: NDArray[np.float64]) -> NDArray[np.int64]:
        rho = self.correlation
        second = rho * scores[:, 0] + math.sqrt(1 - rho * rho) * scores[:, 1]
        lengths = np.stack([self.input.at(ndtr(scores[:, 0])), self.output.at(ndtr(second))], axis=1)
        whole: NDArray[np.int64] = np.maximum(1, np.rint(lengths)).astype(np.int64)
        return whole

    def means(self) -> tuple[float, float]:
        """Mean input and output length, after `max_total_tokens`; by quadrature, not sampling."""
        points = ndtri((np.arange(_QUADRATURE) + 0.5) / _QUADRATURE)
        grid = np.stack(np.meshgrid(points, points), axis=-1).reshape(-1, 2)
        pairs = self._kept(self._pairs(grid))
        return float(pairs[:, 0].mean()), float(pairs[:, 1].mean())

    @classmethod
    def fit(cls, trace: Trace, max_total_tokens: int | None = None) -> JointLengths:
        """Marginal quantiles, and the copula's correlation from Spearman's: 2 sin(pi rho_s / 6)."""
        rank = spearman(trace.input_tokens, trace.output_tokens)
        correlation = min(0.999, max(-0.999, 2 * math.sin(math.pi * rank / 6)))
        return cls(
            Quantiles.fit(trace.input_tokens), Quantiles.fit(trace.output_tokens), round(correlation, 4),
            max_total_tokens,
        )  # fmt: skip


def with_means(lengths: JointLengths, mean_input: float | None, mean_output: float | None) -> JointLengths:
    """The same shape and range with other mean lengths, by tilting the marginals.

    The means are those of the joint distribution, after `max_total_tokens`. Raises `ConfigError` if one is
    not reached within 0.1 %, as beyond the range of the lengths.
    """
    tilts, tilted = [0.0, 0.0], lengths
    wanted: list[float] = []
    for _ in range(40):
        found = tilted.means()
        wanted = wanted or [mean_input or found[0], mean_output or found[1]]
        errors = [math.log(w / f) for w, f in zip(wanted, found, strict=True)]
        if all(abs(e) < 1e-3 for e in errors):
            return tilted
        for index, marginal in enumerate((tilted.input, tilted.output)):
            # d log(mean) / d tilt = var / (mean max): one Newton step per marginal
            slope = marginal.variance / (marginal.mean * marginal.tokens[-1])
            tilts[index] = min(200.0, max(-200.0, tilts[index] + errors[index] / max(slope, 1e-9)))
        tilted = replace(
            lengths, input=lengths.input.tilted(tilts[0]), output=lengths.output.tilted(tilts[1])
        )
    raise ConfigError(
        f"mean_input={wanted[0]:g}, mean_output={wanted[1]:g}: the nearest reached is {found[0]:.1f}, "
        f"{found[1]:.1f} within {lengths.input.tokens[0]:g} to {lengths.input.tokens[-1]:g} and "
        f"{lengths.output.tokens[0]:g} to {lengths.output.tokens[-1]:g} tokens"
    )


def spearman(a: Sequence[int] | NDArray[np.int64], b: Sequence[int] | NDArray[np.int64]) -> float:
    """Spearman's rank correlation, ties at their mean rank; 0 if one side is constant."""
    ranks = [_ranks(np.asarray(v)) for v in (a, b)]
    if any(r.std() == 0 for r in ranks):
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: NDArray[np.int64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]
