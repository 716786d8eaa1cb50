"""How much of a GPU's memory the largest batches take, found by running them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distserve.core.config import EngineConfig
from distserve.worker.step import Joining, SamplingParams, StepInput, StepItem

MARGIN_SHARE = 0.02  # of the device's memory: fragments, and what libraries allocate later
TRANSFER_BYTES = 1 << 30  # of an instance that exchanges KV: staging buffers and NCCL's communicators
COSTLIEST = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1)  # sorts the vocabulary


def largest_prompt(config: EngineConfig, context: int) -> int:
    """Tokens of the largest prompt step. A prompt above `max_batch_tokens` runs alone and whole, unless it is
    computed in pieces; a decode instance computes preempted requests again.
    """
    if config.role == "unified" and config.policy == "chunked_prefill":
        return config.chunk_tokens
    if config.role == "prefill" and config.prefill_chunk_tokens is not None:
        return max(config.max_batch_tokens, config.prefill_chunk_tokens)
    return max(config.max_batch_tokens, context)


def prompt_step(tokens: int, context: int, block_size: int) -> StepInput:
    """Prompts of `tokens` tokens together, none above `context`, all in block 0, whose content is of no
    account.
    """
    items = []
    for index, first in enumerate(range(0, tokens, context)):
        count = min(context, tokens - first)
        items.append(StepItem(f"prompt {index}", [0] * count, 0, [0] * -(-count // block_size)))
    return StepInput(items, [Joining(item.key, COSTLIEST, len(item.tokens), []) for item in items])


def decode_step(batch: int, context: int, block_size: int) -> StepInput:
    """A decode step of `batch` sequences of `context` tokens, likewise."""
    table = [0] * -(-context // block_size)
    items = [StepItem(f"decode {index}", [0], context - 1, table) for index in range(batch)]
    return StepInput(items, [Joining(item.key, COSTLIEST, context - 1, []) for item in items])


def leaving(step: StepInput) -> StepInput:
    """After it nothing is known of the step's sequences."""
    return StepInput([], leaving=[item.key for item in step.items])


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Memory of a GPU that torch takes while the work runs, beyond what it has before."""
    cuda: Any = torch.cuda  # untyped in torch
    cuda.synchronize(device)
    cuda.empty_cache()
    cuda.reset_peak_memory_stats(device)
    before = cuda.memory_reserved(device)
    work()
    cuda.synchronize(device)
    peak = int(cuda.max_memory_reserved(device)) - int(before)
    cuda.empty_cache()
    return max(0, peak)


def driver_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Memory of a GPU that the work leaves taken beside torch's own, as the nodes of graphs are."""
    before = _beside_torch(device)
    work()
    return max(0, _beside_torch(device) - before)


def _beside_torch(device: torch.device) -> int:
    cuda: Any = torch.cuda  # untyped in torch
    cuda.synchronize(device)
    free, total = cuda.mem_get_info(device)
    return int(total) - int(free) - int(cuda.memory_reserved(device))
