"""Every shape of prefill instance with every shape of decode instance gives the tokens of one process."""

from __future__ import annotations

import itertools

import pytest
import torch

from model_zoo import Zoo
from parallel_pairs import Driver, Shaped, prompts, settings, started

MODELS = ("llama", "opt", "llama-gqa-tied")  # 4 KV heads; LayerNorm and biases; 2 KV heads
SHAPES = tuple(Shaped(tp, pp) for tp, pp in itertools.product((1, 2, 4), (1, 2)))


def check_pairs(
    zoo: Zoo, name: str, prefills: tuple[Shaped, ...], decodes: tuple[Shaped, ...], **more: str
) -> None:
    """All pairs of these shapes, alone and with 16 requests at once; then all blocks must be free."""
    torch.set_num_threads(1)  # the engines have the cores
    model = zoo(name)
    driver = Driver(model)
    sets = [prompts(1), prompts(16)]
    expected = [[driver.expected(tokens) for tokens in some] for some in sets]
    configs = {f"p-{s}": settings(model, f"p-{s}", "prefill", s, **more) for s in prefills}
    configs |= {f"d-{s}": settings(model, f"d-{s}", "decode", s, **more) for s in decodes}
    with started(configs) as engines:
        for p, d in itertools.product(prefills, decodes):
            for some, tokens in zip(sets, expected, strict=True):
                found = driver.through(engines[f"p-{p}"], engines[f"d-{d}"], some)
                assert found == tokens, f"{name}: {p} to {d}, {len(some)} requests"
        for engine in engines.values():
            assert engine.settled()["failed"] == 0


def test_splits_and_joins_of_heads_and_layers(zoo: Zoo) -> None:
    check_pairs(zoo, "llama", (Shaped(2, 1), Shaped(1, 2)), (Shaped(1, 2), Shaped(4, 1)))


def test_replicated_heads_and_both_kinds_of_parallelism(zoo: Zoo) -> None:
    check_pairs(zoo, "llama-gqa-tied", (Shaped(4, 1),), (Shaped(2, 2),))


def test_gloo_between_the_ranks(zoo: Zoo) -> None:
    check_pairs(zoo, "opt", (Shaped(1, 2),), (Shaped(2, 1),), collectives="gloo")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MODELS)
def test_all_pairs(zoo: Zoo, name: str) -> None:
    check_pairs(zoo, name, SHAPES, SHAPES)  # 42 ranks at the same time, some 7 GB


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_pairs_over_gloo(zoo: Zoo) -> None:
    check_pairs(zoo, "llama", SHAPES, SHAPES, collectives="gloo")
