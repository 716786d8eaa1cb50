"""Token choice: determinism, distributions, truncation against a numpy twin, penalties, logprobs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from distserve.core.parsing import ConfigError
from distserve.worker.rng import uniform
from distserve.worker.sampler import Sampler
from distserve.worker.step import Joining, SamplingParams, TokenLogprobs
from distserve_kernels import compiled, sampling, sampling_reference
from distserve_kernels.sampling_reference import Truncation

VOCAB = 500
Draw = Callable[[torch.Tensor, Truncation, torch.Tensor], torch.Tensor]
DRAWS = [sampling.draw, sampling_reference.draw]  # C where it can be built, and torch
CPU = torch.device("cpu")
Floats = npt.NDArray[np.float64]


def sampler_with(*params: SamplingParams, prompt: list[int] | None = None) -> Sampler:
    """Sequences "0", "1", ... with these parameters and one prompt."""
    tokens = prompt or [1, 2, 3]
    sampler = Sampler(VOCAB, CPU)
    for i, p in enumerate(params):
        sampler.join(Joining(str(i), p, len(tokens), list(tokens)))
    return sampler


def one(params: SamplingParams, logits: torch.Tensor, position: int = 3) -> int:
    return sampler_with(params).sample(logits.view(1, -1), ["0"], [position])[0][0]


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(3)) * 3


def kept_tokens(logits: Floats, p: SamplingParams) -> set[int]:
    """The plain twin: temperature, top_k, top_p over the rest, min_p, one after the other."""
    scores = logits / p.temperature
    order = np.argsort(-scores, kind="stable")
    if p.top_k:
        order = order[: p.top_k]
    probabilities = np.exp(scores[order] - scores.max())
    probabilities /= probabilities.sum()
    kept = []
    mass = 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if kept and p.top_p < 1 and mass >= p.top_p:
            break
        mass += probability
        if probability >= p.min_p * probabilities[0]:
            kept.append(int(token))
    return set(kept)


MIXED = [
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=20, seed=6),
    SamplingParams(temperature=1.3, top_p=0.8, seed=7),
    SamplingParams(temperature=1.0, min_p=0.1, seed=8),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.2, seed=9),
    SamplingParams(temperature=1.0, frequency_penalty=0.5, presence_penalty=0.3, seed=10, logprobs=2),
    SamplingParams(temperature=2.0, top_p=0.999, seed=11),
]


def test_the_batch_changes_nothing(logits: torch.Tensor) -> None:
    keys = [str(i) for i in range(len(MIXED))]
    rows = logits[: len(MIXED)]
    positions = list(range(3, 3 + len(MIXED)))
    together = sampler_with(*MIXED).sample(rows.clone(), keys, positions)[0]
    for i in range(len(MIXED)):
        alone = sampler_with(*MIXED).sample(rows[i : i + 1].clone(), [keys[i]], [positions[i]])[0]
        assert alone == [together[i]]
    order = [3, 0, 7, 5, 1, 6, 2, 4]
    shuffled = sampler_with(*MIXED).sample(
        rows[order], [keys[i] for i in order], [positions[i] for i in order]
    )
    assert shuffled[0] == [together[i] for i in order]


def test_a_restarted_sequence_goes_on_as_before(logits: torch.Tensor) -> None:
    """A decode instance, given prompt and output, chooses what the prefill instance would have."""
    params = SamplingParams(
        temperature=1.0, seed=4, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2
    )
    whole = sampler_with(params)
    chosen = [whole.sample(logits[i : i + 1].clone(), ["0"], [3 + i])[0][0] for i in range(8)]
    moved = Sampler(VOCAB, CPU)
    moved.join(Joining("x", params, 3, [1, 2, 3, *chosen[:4]]))
    assert [moved.sample(logits[i : i + 1].clone(), ["x"], [3 + i])[0][0] for i in range(4, 8)] == chosen[4:]


def test_greedy_is_the_arg_max_with_and_without_extras(logits: torch.Tensor) -> None:
    want = logits.argmax(-1).tolist()
    for params in (SamplingParams(), SamplingParams(logprobs=1), SamplingParams(top_k=5, top_p=0.5)):
        sampler = sampler_with(*[params] * 16)
        assert sampler.sample(logits.clone(), [str(i) for i in range(16)], [3] * 16)[0] == want


def test_seeds_and_positions_matter(logits: torch.Tensor) -> None:
    flat = torch.zeros(VOCAB)
    by_seed = {one(SamplingParams(temperature=1.0, seed=s), flat) for s in range(50)}
    by_position = {one(SamplingParams(temperature=1.0, seed=1), flat, p) for p in range(50)}
    assert len(by_seed) > 40
    assert len(by_position) > 40


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.5, top_k=6),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=1.2, top_k=8, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
@pytest.mark.parametrize("draw", DRAWS)
def test_draws_follow_the_distribution(params: SamplingParams, draw: Draw) -> None:
    """Chi-square of 4000 draws; the bound is passed by chance once in 10^5."""
    from scipy.stats import chi2

    small = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 1.5
    n = 4000
    how = Truncation(
        *(
            torch.full((n,), value, dtype=dtype)
            for value, dtype in (
                (params.temperature, torch.float32),
                (params.top_k, torch.int64),
                (params.top_p, torch.float32),
                (params.min_p, torch.float32),
            )
        )
    )
    uniforms = torch.tensor([uniform(7, i) for i in range(n)], dtype=torch.float64)
    drawn = draw(small.expand(n, -1), how, uniforms).numpy()
    kept = sorted(kept_tokens(small.double().numpy(), params))
    assert set(drawn.tolist()) <= set(kept)
    weights = np.exp(small.double().numpy()[kept] / params.temperature)
    expected = weights / weights.sum() * n
    observed = np.array([(drawn == token).sum() for token in kept])
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert statistic < chi2.isf(1e-5, len(kept) - 1)


@pytest.mark.parametrize("top_k", [0, 1, 7, 300])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.3, 0.01])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("draw", DRAWS)
def test_truncation_against_the_twin(
    logits: torch.Tensor, top_k: int, top_p: float, min_p: float, draw: Draw
) -> None:
    """Every uniform lands in the kept set, and the ends of the range reach its first and last token."""
    for row, temperature in (
        (logits[0], 1.0),
        (logits[1], 3.0),
    ):  # 3.0: more candidates than are ranked first
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        kept = kept_tokens(row.double().numpy(), params)
        n = 64
        how = Truncation(
            torch.full((n,), temperature),
            torch.full((n,), top_k),
            torch.full((n,), top_p),
            torch.full((n,), min_p),
        )
        uniforms = torch.linspace(0, 1, n, dtype=torch.float64).clamp(max=1 - 2**-53)
        drawn = draw(row.expand(n, -1), how, uniforms).tolist()
        assert set(drawn) <= kept
        assert drawn[0] == min(kept)
        assert drawn[-1] == max(kept)
        assert drawn == sorted(drawn)


def test_penalties_against_plain_arithmetic(logits: torch.Tensor) -> None:
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=-0.4, logprobs=0)
    sampler = sampler_with(params, prompt=[10, 11, 11])
    output: list[int] = []
    for step in range(6):
        row = logits[step].clone()
        for token in {10, 11, *output}:
            row[token] = row[token] / 1.5 if row[token] > 0 else row[token] * 1.5
        for token in set(output):
            row[token] -= 0.7 * output.count(token) - 0.4
        tokens, _ = sampler.sample(logits[step : step + 1], ["0"], [3 + step])
        assert tokens == [int(row.argmax())]
        output += tokens


def test_min_tokens_hides_the_end_until_then() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 7], row[0, 9] = 5.0, 4.0
    sampler = sampler_with(SamplingParams(min_tokens=2, end_ids=(7,)))
    chosen = [sampler.sample(row.clone(), ["0"], [position])[0][0] for position in (3, 4, 5)]
    assert chosen == [9, 9, 7]


def test_logprobs_are_the_models_own(logits: torch.Tensor) -> None:
    asked = SamplingParams(temperature=0.5, top_k=2, logprobs=3, seed=2, repetition_penalty=1.5)
    sampler = sampler_with(asked, SamplingParams(), SamplingParams(logprobs=0))
    tokens, logprobs = sampler.sample(logits[:3].clone(), ["0", "1", "2"], [3, 3, 3])
    table = logits[0].log_softmax(-1)
    first, second, third = logprobs
    assert isinstance(first, TokenLogprobs)
    assert first.chosen == pytest.approx(float(table[tokens[0]]), abs=1e-5)
    assert first.top_ids == tuple(table.topk(3).indices.tolist())
    assert first.top_logprobs == pytest.approx(table.topk(3).values.tolist(), abs=1e-5)
    assert second is None
    assert third is not None
    assert third.top_ids == ()


def test_a_dominant_token_is_always_drawn_whatever_the_uniform() -> None:
    row = torch.full((VOCAB,), -1e9)
    row[3] = 0
    for seed in range(20):
        assert one(SamplingParams(temperature=1.0, seed=seed), row) == 3
        assert one(SamplingParams(temperature=1.0, top_p=0.9, seed=seed), row) == 3


def test_states_come_and_go() -> None:
    sampler = sampler_with(SamplingParams(), SamplingParams())
    assert len(sampler) == 2
    sampler.leave("0")
    sampler.leave("never there")
    assert len(sampler) == 1
    with pytest.raises(KeyError):
        sampler.sample(torch.zeros(1, VOCAB), ["0"], [3])


def test_uniform_is_even_and_spread() -> None:
    values = np.array([uniform(seed, position) for seed in range(40) for position in range(100)])
    assert (values >= 0).all()
    assert (values < 1).all()
    assert len(np.unique(values)) == len(values)
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((counts - 200) ** 2 / 200).sum() < 56  # chi-square of 19 degrees: 1.6e-5
    grid = values.reshape(40, 100)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.06
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.06


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("seed", 2**64),
    ],
)
def test_parameters_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value}".replace("+", r"\+")):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_argmax_takes_the_first_of_equal_logits() -> None:
    rows = torch.zeros(3, 37)
    rows[0, 20:] = 1
    rows[1, 36] = 2
    assert sampling.argmax(rows).tolist() == [20, 36, 0]
    wide = torch.randn(5, 80)
    assert sampling.argmax(wide[:, :67]).tolist() == wide[:, :67].argmax(-1).tolist()
    assert sampling.argmax(torch.zeros(0, 7)).tolist() == []


@pytest.mark.skipif(compiled.library() is None, reason="torch's topk promises no order among equals")
def test_ties_at_a_limit_go_to_the_lower_ids() -> None:
    row = torch.zeros(1, 100)
    n = 50
    how = Truncation(torch.ones(n), torch.full((n,), 3), torch.ones(n), torch.zeros(n))
    uniforms = torch.linspace(0, 0.999, n, dtype=torch.float64)
    assert set(sampling.draw(row.expand(n, -1), how, uniforms).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 1e-3])
def test_next_to_no_temperature_is_greedy(logits: torch.Tensor, temperature: float) -> None:
    want = int(logits[0].argmax())
    for limits in ({}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.3}):
        for draw in DRAWS:
            params = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **limits}
            how = Truncation(
                torch.tensor([temperature]),
                *(torch.tensor([params[name]]) for name in ("top_k", "top_p", "min_p")),
            )
            uniforms = torch.tensor([0.7], dtype=torch.float64)
            assert draw(logits[:1], how, uniforms).tolist() == [want]
