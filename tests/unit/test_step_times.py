"""What an engine counts of its steps."""

from __future__ import annotations

import itertools
import json

import pytest

from distserve.engine.step_times import StepShape, StepSums, StepTimes, step_class
from engine_node import Node, continuation


@pytest.mark.parametrize(
    ("tokens", "decodes", "expected"),
    [
        (0, 1, (0, 1)), (0, 16, (0, 16)), (0, 17, (0, 24)), (0, 24, (0, 24)), (0, 25, (0, 32)),
        (1, 0, (1, 0)), (2, 0, (2, 0)), (3, 0, (4, 0)), (64, 3, (64, 3)), (65, 3, (128, 3)),
    ],
)  # fmt: skip
def test_steps_are_classed_by_prompt_tokens_and_decodes(
    tokens: int, decodes: int, expected: tuple[int, int]
) -> None:
    assert step_class(tokens, decodes) == expected


def test_classes_are_few_whatever_is_served() -> None:
    classes = {step_class(t, d) for t, d in itertools.product((0, 1, 100, 2048, 8192), range(257))}
    assert len(classes) <= 5 * (17 + 30)


def test_sums_of_a_class_add_up_and_can_be_sent() -> None:
    times = StepTimes()
    times.add(StepShape(0, 0, 0, 0, 3, 100), 0.25, 0.2)
    times.add(StepShape(0, 0, 0, 0, 3, 103), 0.35, 0.3)
    times.add(StepShape(100, 10_000, 1, 1, 0, 0), 1.0, 0.9)
    first, second = json.loads(json.dumps(times.to_wire()))
    assert first == {
        "prompt_tokens_to": 0, "decodes_to": 3, "steps": 2, "prompt_tokens": 0, "prompt_squares": 0,
        "prompts": 0, "prompt_ends": 0, "decodes": 6, "context_tokens": 203, "wall_s": 0.6, "cpu_s": 0.5,
    }  # fmt: skip
    assert (second["prompt_tokens_to"], second["prompts"], second["wall_s"]) == (128, 1, 1.0)
    assert StepSums(2, wall_s=0.6).minus(StepSums(1, wall_s=0.25)) == StepSums(1, wall_s=0.35)


@pytest.mark.parametrize("lag", [0, 1])
def test_every_step_of_an_engine_is_counted_once(lag: int) -> None:
    """Also steps that begin before the one before them has ended, with the counts of their beginning."""
    node = Node("unified", policy="chunked_prefill", lag=lag)
    prompts = {id: [ord(id) % 97] * n for id, n in (("a", 5), ("b", 13), ("c", 20))}
    for id, prompt in prompts.items():
        node.submit(id, prompt, 6)
    node.until(lambda: all(map(node.over, prompts)))
    for id, prompt in prompts.items():
        assert node.tokens(id) == continuation(prompt, 6)
    seen = StepSums()
    for entry in node.loop.step_times.to_wire():
        del entry["prompt_tokens_to"], entry["decodes_to"]
        seen = seen.plus(StepSums(**entry))
    counters = node.loop.counters
    assert seen.steps == counters.steps
    assert seen.prompt_tokens == counters.prompt_tokens == 5 + 13 + 20
    assert seen.prompt_squares == 5**2 + 13**2 + 20**2  # in whatever pieces they were computed
    assert seen.prompt_ends == 3 < seen.prompts
    # the first token of each is sampled by its prompt's step; a late one that had ended is computed in vain
    decoded = sum(len(node.tokens(id)) - 1 for id in prompts)
    assert decoded <= seen.decodes <= decoded + lag * len(prompts)
    exact = sum(n + k for n in (5, 13, 20) for k in range(1, 6))
    assert exact <= seen.context_tokens <= exact + lag * sum(n + 6 for n in (5, 13, 20))
    assert seen.cpu_s > 0
