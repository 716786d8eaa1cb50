"""Pools with more than 2^31 elements: offsets into pages must be 64-bit. Needs a device with about 20 GB."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distserve_kernels.backend import PrefillMeta
from distserve_kernels.layout import TOKENS
from distserve_kernels.page_copy import PageSet, pack, unpack
from distserve_kernels.reference import ReferenceBackend

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

PAGE, KV_HEADS, HEAD_DIM = 16, 4, 128
BLOCKS = 2**31 // (PAGE * KV_HEADS * HEAD_DIM) + 4
LENGTH = 3 * PAGE - 5
TABLE = [BLOCKS - 2, 1, BLOCKS - 1]


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of free device memory")
    return torch.device("cuda")


@pytest.fixture
def filled(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K and V pages in which the backend has stored `LENGTH` tokens, with what was stored."""
    from distserve_kernels.triton_lang.backend import make

    keys, values = TOKENS.allocate(BLOCKS, PAGE, KV_HEADS, HEAD_DIM, torch.bfloat16, device)
    k, v = (torch.randn(LENGTH, KV_HEADS, HEAD_DIM, device=device).bfloat16() for _ in range(2))
    place = torch.arange(LENGTH, device=device)
    slots = torch.tensor(TABLE, device=device)[place // PAGE] * PAGE + place % PAGE
    make(device).store(k, v, keys, values, slots)
    return keys, values, k, v


def test_attention_finds_what_was_stored(filled: tuple[Tensor, ...], device: torch.device) -> None:
    from distserve_kernels.triton_lang.backend import make

    keys, values, k, v = filled
    backend, reference = make(device), ReferenceBackend(TOKENS)
    meta = PrefillMeta.build([LENGTH], [0], [TABLE], device)
    q = torch.randn(LENGTH, 4 * KV_HEADS, HEAD_DIM, device=device).bfloat16()
    small = TOKENS.allocate(3, PAGE, KV_HEADS, HEAD_DIM, torch.bfloat16, device)
    TOKENS.write(k, v, *small, torch.arange(LENGTH, device=device))
    near = PrefillMeta.build([LENGTH], [0], [[0, 1, 2]], device)

    expected = reference.prefill(q, k, v, *small, near, 0.1)
    actual = backend.prefill(q, k, v, keys, values, meta, 0.1)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    actual = backend.decode(q[-1:], keys, values, meta.block_tables, meta.context_lens, 0.1)
    torch.testing.assert_close(actual, expected[-1:], rtol=2e-2, atol=2e-2)


def test_blocks_are_packed_from_and_to_the_far_end(filled: tuple[Tensor, ...], device: torch.device) -> None:
    keys, values, *_ = filled
    pages, heads = PageSet.of([keys, values], TOKENS.kv_head_axis), range(1, 3)
    source = torch.tensor(TABLE, device=device)
    buffer = torch.empty(2 * 3 * PAGE * 2 * HEAD_DIM, dtype=torch.bfloat16, device=device)
    packed = pack(pages, range(2), source, heads, buffer)
    for number, tensor in enumerate((keys, values)):
        for place, block in enumerate(TABLE):
            assert torch.equal(packed[number, place], tensor[block, :, 1:3])
    unpack(pages, range(2), torch.tensor([2, BLOCKS - 3, 3], device=device), heads, buffer)
    assert torch.equal(values[BLOCKS - 3, :, 1:3], values[1, :, 1:3])
    assert not values[BLOCKS - 3, :, 0].any()
