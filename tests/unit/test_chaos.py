"""The judges of the chaos scenarios: they must be able to fail."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distserve_tools.chaos.handles import FORGERIES
from distserve_tools.chaos.invariants import Aftermath, left_over, slope
from distserve_tools.chaos.load import Expectation, Job, streaming
from distserve_tools.chaos.model import random_prompt, tiny_model
from distserve_tools.chaos.outcome import Outcome
from distserve_tools.chaos.scenarios import scenarios
from distserve_tools.cli import main
from distserve_tools.client import Chunk, RequestError

JOB = Job((5, 6, 7), 3)
RIGHT = (9, 8, 7)


def chunks(*tokens: int, recoveries: int = 0) -> Iterator[Chunk]:
    for token in tokens[:-1]:
        yield Chunk("", (token,))
    yield Chunk("", tokens[-1:], "length", 3, len(tokens), {"recoveries": recoveries})


def broken(error: Exception, *tokens: int) -> Iterator[Chunk]:
    for token in tokens:
        yield Chunk("", (token,))
    raise error


def twice() -> Iterator[Chunk]:
    yield from chunks(*RIGHT)
    yield Chunk("", (1,))


def endless() -> Iterator[Chunk]:
    yield Chunk("", (9,))


@pytest.mark.parametrize(
    ("stream", "fate"),
    [
        (chunks(*RIGHT), "finished"),
        (chunks(*RIGHT, recoveries=1), "continued"),
        (chunks(9, 8, 8), "lost"),
        (chunks(9, 9, 8, 7), "lost"),
        (chunks(9, 7), "lost"),
        (broken(RequestError("UNAVAILABLE", "gone"), 9, 8), "refused"),
        (broken(RequestError("UNAVAILABLE", "gone"), 9, 7), "lost"),
        (broken(RequestError("INTERNAL", "?"), 9), "lost"),
        (broken(OSError("?"), 9), "lost"),
        (twice(), "lost"),
        (endless(), "lost"),
    ],
)
def test_a_stream_is_judged_by_its_tokens_and_its_end(stream: Iterator[Chunk], fate: str) -> None:
    deployment: Any = SimpleNamespace(client=SimpleNamespace(stream=lambda *_, **__: stream))
    with streaming(deployment, [JOB], {JOB: RIGHT}, clients=1) as streams:
        pass
    assert streams.counts == Counter([fate])


def test_an_error_that_comes_late_is_a_loss() -> None:
    stream = broken(RequestError("UNAVAILABLE", "gone"), 9)
    deployment: Any = SimpleNamespace(client=SimpleNamespace(stream=lambda *_, **__: stream))
    with streaming(deployment, [JOB], {JOB: RIGHT}, 1, Expectation(within_s=-1.0)) as streams:
        pass
    assert streams.counts == Counter(["lost"])


def idle_status() -> dict[str, Any]:
    keys = ("queued", "queued_tokens", "running", "leases", "transfers_pending", "requests", "leases_held")
    instance = {"instance": "decode_0", "blocks_free": 10, "hung_calls": 1, **dict.fromkeys(keys, 0)}
    head = {"requests": 0, "queued": 0, "queued_tokens": 0, "handoffs": 0, "tasks": 7}
    return {**head, "instances": [instance]}


def test_what_is_left_over_is_named() -> None:
    status = idle_status()
    assert left_over(status, {"decode_0": 10}, 7) == []
    for key in ("requests", "handoffs"):
        assert left_over({**status, key: 1}, {"decode_0": 10}, 7) == [f"{key}=1"]
    assert left_over(status, {"decode_0": 11}, 7) == ["decode_0: 10 blocks free, 11 at the start"]
    assert left_over(status, {"decode_0": 10}, 6) == ["tasks=7, 6 at the start"]
    status["instances"][0] |= {"leases": 2, "hung_calls": 99}
    named = left_over(status, {"decode_0": 10}, 7)
    assert named == ["decode_0: leases=2", "decode_0: 99 hung calls, at most 16"]


def test_an_outcome_fails_by_loss_leftovers_or_notes() -> None:
    well = Aftermath(0.5, 0, ())
    assert Outcome("x", 0, Counter(finished=2), well).ok
    assert not Outcome("x", 0, Counter(finished=2, lost=1), well).ok
    assert not Outcome("x", 0, Counter(finished=2), Aftermath(0.5, 0, ("queued=1",))).ok
    assert not Outcome("x", 0, Counter(finished=2), well, ["memory grows"]).ok


def test_slope_is_that_of_the_line() -> None:
    assert slope([(x, 3.0 * x + 5) for x in range(10)]) == pytest.approx(3.0)
    assert slope([(1.0, 4.0)]) == 0.0


def test_the_model_knows_its_greedy_tokens(tmp_path: Path) -> None:
    import torch

    model = tiny_model(tmp_path)
    prompt = random_prompt(9, random.Random(1))
    tokens: list[int] = []
    for _ in range(6):
        with torch.inference_mode():
            tokens.append(int(model._reference(torch.tensor([[*prompt, *tokens]])).logits[0, -1].argmax()))
    assert model.greedy_mismatch(prompt, tokens) is None
    tokens[3] ^= 1
    assert model.greedy_mismatch(prompt, tokens) == 3


def test_every_forgery_differs_from_the_good_handle() -> None:
    layout = {"model_hash": "a", "dtype": "fp32", "block_size": 16, "layers": 2, "kv_heads": 2}
    layout |= {"head_dim": 16, "tp": 1, "pp": 1, "page_format": "x"}
    good = {"instance": "prefill_0", "epoch": 3, "request_id": "1", "nonce": bytes(16), "num_tokens": 5}
    good |= {"first_token": 4, "layout": layout, "addresses": ["127.0.0.1:1"]}
    for what, forge in FORGERIES.items():
        assert forge(good, random.Random(0)) != good, what


def test_the_command_names_its_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(scenarios())
    assert main(["chaos", "--scenario", "kill-decode-engin"]) == 2
    assert "kill-decode-engine" in capsys.readouterr().err
