"""Every family computes what transformers computes on the same checkpoint."""

from __future__ import annotations

import pytest
import torch

import model_zoo
from dense_attention import DenseAttention
from distserve.models.base import Model
from distserve.models.registry import load_model
from distserve.worker.parallel import ParallelGroup
from model_zoo import Zoo

LENGTH = 70  # more than twice llama3-rope's original context, and eight sliding windows


def logits_of(model: Model, tokens: list[int], pieces: tuple[int, ...] = ()) -> torch.Tensor:
    """Logits at every position, the tokens fed in pieces that end at the given indices."""
    attn = DenseAttention()
    ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
    out = []
    for start, stop in zip((0, *pieces), (*pieces, len(tokens)), strict=True):
        out.append(model.logits(model.forward(ids[start:stop], positions[start:stop], attn)))
    return torch.cat(out)


@pytest.mark.parametrize("name", model_zoo.NAMES)
def test_logits_equal_transformers(zoo: Zoo, name: str) -> None:
    checkpoint, tokens = zoo(name), model_zoo.prompt(LENGTH)
    model = load_model(checkpoint.folder, ParallelGroup(), None, torch.float32, "cpu")
    expected = checkpoint.logits(tokens)
    assert expected.std() > 0.3  # the comparison below can fail
    found = logits_of(model, tokens)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    in_pieces = logits_of(model, tokens, pieces=(40, 41, 42, 63))
    torch.testing.assert_close(in_pieces, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("prepack", ["off", "packed", "both"])
def test_every_form_of_the_weights_gives_the_same(zoo: Zoo, prepack: str) -> None:
    checkpoint, tokens = zoo("llama-biased"), model_zoo.prompt(LENGTH)
    model = load_model(checkpoint.folder, ParallelGroup(), None, torch.float32, "cpu", prepack)  # type: ignore[arg-type]
    found = logits_of(model, tokens, pieces=(1, 2, 5))
    torch.testing.assert_close(found, checkpoint.logits(tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama3-rope", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_fp32_as_transformers_is(
    zoo: Zoo, name: str, dtype: torch.dtype
) -> None:
    checkpoint, tokens = zoo(name), model_zoo.prompt(LENGTH)
    exact = checkpoint.logits(tokens)
    half = type(checkpoint.reference).from_pretrained(checkpoint.folder, dtype=dtype).eval()
    with torch.inference_mode():
        theirs = half(torch.tensor([tokens])).logits[0].float()
    ours = logits_of(load_model(checkpoint.folder, ParallelGroup(), None, dtype, "cpu"), tokens)
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() < 1.3 * (theirs - exact).abs().mean()
    assert (ours - exact).abs().max() < 0.2 * exact.std()
    assert torch.equal(ours, ours.to(dtype).float())  # computed in the model's dtype, widened at the end


@pytest.mark.parametrize("name", ["llama-gqa-tied", "qwen2-window", "opt", "opt-350m", "gpt2"])
@pytest.mark.parametrize("cut", [1, 2])
def test_two_pipeline_stages_equal_one(zoo: Zoo, name: str, cut: int) -> None:
    checkpoint, tokens = zoo(name), model_zoo.prompt(LENGTH)
    whole, first, last = (
        load_model(checkpoint.folder, ParallelGroup(), layers, torch.float32, "cpu")
        for layers in (None, range(cut), range(cut, 3))
    )
    ids, positions = torch.tensor(tokens), torch.arange(LENGTH)
    hidden = first.forward(ids, positions, DenseAttention())
    found = last.logits(last.forward(hidden, positions, DenseAttention()))
    assert torch.equal(found, logits_of(whole, tokens))
    with pytest.raises(ValueError, match=f"layers 0 to {cut - 1} hold no head"):
        first.logits(hidden)


def test_a_stage_must_be_a_part_of_the_model(zoo: Zoo) -> None:
    for layers in (range(2, 4), range(1, 1), range(0, 3, 2)):
        with pytest.raises(ValueError, match=r"non-empty part of range\(0, 3\)"):
            load_model(zoo("llama").folder, ParallelGroup(), layers, torch.float32, "cpu")


def test_logits_of_a_row_do_not_depend_on_the_other_rows(zoo: Zoo) -> None:
    model = load_model(zoo("llama").folder, ParallelGroup(), None, torch.float32, "cpu")
    tokens = model_zoo.prompt(LENGTH)
    hidden = model.forward(torch.tensor(tokens), torch.arange(LENGTH), DenseAttention())
    torch.testing.assert_close(model.logits(hidden[50:51]), model.logits(hidden)[50:51], atol=1e-5, rtol=0)


class NoAttention:
    """Returns q: for tests that look at devices and shapes."""

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sliding_window: int | None,
        rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        return q.contiguous()

    def decode_rows(self) -> None:
        return None


@pytest.mark.parametrize("name", ["qwen3", "opt-350m", "gpt2"])
def test_everything_lives_on_the_device_that_was_asked_for(zoo: Zoo, name: str) -> None:
    device = torch.device("meta")  # mixing it with CPU tensors raises
    model = load_model(zoo(name).folder, ParallelGroup(), None, torch.bfloat16, device)
    ids = torch.zeros(5, dtype=torch.int64, device=device)
    logits = model.logits(model.forward(ids, ids, NoAttention()))
    assert (logits.device, logits.dtype, logits.shape) == (device, torch.float32, (5, model_zoo.VOCAB))
    assert (model.device, model.dtype) == (device, torch.bfloat16)
