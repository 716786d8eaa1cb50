"""Decode and prefill of the model runner, as the engine's loop drives it: how near to the ceilings."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig
from distserve.worker.device import parse_device
from distserve.worker.kv_cache import free_bytes
from distserve.worker.runner import TORCH_DTYPE, ModelRunner
from distserve.worker.step import LAST_SAMPLED, Joining, SamplingParams, StepInput, StepItem
from distserve_tools.device_check import ceilings
from distserve_tools.device_check.settings import Settings
from distserve_tools.device_check.shapes import (
    LOADS,
    Load,
    RandomWeights,
    model_config,
    prefill_flops,
    weight_bytes,
)

BLOCK = 16
WARM_STEPS = 3
STEPS_S = 0.5  # of timed decode steps
MOST_STEPS = 48
SPARE = {"device": 6 << 30, "small": 64 << 20}  # of the device's memory, for steps and graphs
LEAST_BLOCKS = 64


def run(settings: Settings, name: str) -> dict[str, Any]:
    """Rows for every batch x context and every prompt of the load that fit."""
    device, dtype = parse_device(settings.device).torch_device, TORCH_DTYPE[settings.dtype]
    model, load = model_config(name), LOADS[settings.scale]
    began = time.perf_counter()
    runner, blocks = _runner(settings, name, model, load)
    ready_s = time.perf_counter() - began
    bandwidth, rate = ceilings.read(settings)
    bench = RunnerBench(runner, model, blocks)
    weights = weight_bytes(model, dtype.itemsize)
    kv_token = model.kv_bytes_per_token(settings.dtype)
    rows: list[dict[str, Any]] = []
    left_out = []
    for context, batch in itertools.product(load.contexts, load.batches):
        if not bench.fits(batch, context):
            left_out.append(f"decode of {batch} x {context}: {blocks * BLOCK} tokens of KV fit")
            continue
        step_s = bench.decode_s(batch, context, ahead=True)
        plain_s = bench.decode_s(batch, context, ahead=False)
        moved = weights + batch * context * kv_token
        rows.append(
            {
                "what": "decode",
                "batch": batch,
                "context": context,
                "step_s": step_s,
                "tokens_s": batch / step_s,
                "share": moved / step_s / bandwidth,
                "without_graphs_s": plain_s,
                "outside_kernels": None,
            }
        )
    for tokens in load.prompts:
        if not bench.fits(1, tokens):
            left_out.append(f"prefill of {tokens}: {blocks * BLOCK} tokens of KV fit")
            continue
        step_s = bench.prefill_s(tokens)
        flops = prefill_flops(model, tokens)
        rows.append(
            {
                "what": "prefill",
                "batch": 1,
                "context": tokens,
                "step_s": step_s,
                "tokens_s": tokens / step_s,
                "share": flops / step_s / rate,
            }
        )
    for row in rows:  # last, as a profiler slows down what comes after it; and few: each takes a second
        if settings.on_gpu and row["what"] == "decode" and row["context"] == load.contexts[0]:
            row["outside_kernels"] = bench.outside_kernels(row["batch"], row["context"], row["step_s"])
    return {
        "model": name,
        "attention": runner.attention_name,
        "ready_s": ready_s,
        "weight_bytes": weights,
        "kv_tokens": blocks * BLOCK,
        "rows": rows,
        "left_out": left_out,
        "device": str(device),
    }


def _runner(settings: Settings, name: str, model: ModelConfig, load: Load) -> tuple[ModelRunner, int]:
    """The model with random weights on the device, and the blocks of its pool."""
    parsed = parse_device(settings.device)
    dtype = TORCH_DTYPE[settings.dtype]
    context = max(*load.contexts, *load.prompts) + MOST_STEPS + WARM_STEPS + BLOCK
    values = {
        "instance": "check",
        "role": "unified",
        "model": name,
        "devices": [settings.device],
        "dtype": settings.dtype,
        "max_batch_size": max(load.batches),
        "max_context": context,
        "decode_graphs": True,
        "num_blocks": LEAST_BLOCKS,
    }
    weights = RandomWeights(parsed.torch_device, dtype)
    runner = ModelRunner(EngineConfig.load(values), model, weights=weights)
    block_bytes = BLOCK * model.kv_bytes_per_token(settings.dtype)
    useful = max(load.batches) * -(-context // BLOCK)
    if settings.on_gpu:
        torch.cuda.empty_cache()  # of tensors that were random numbers
    free = free_bytes(parsed.torch_device)
    blocks = max(LEAST_BLOCKS, min(useful, (free - SPARE[settings.scale]) // block_bytes))
    runner.allocate(blocks)
    for layer in range(model.num_layers):
        for pages in runner.kv_cache.pages(layer):
            pages.normal_()  # zeros would cost less power, and time, than real keys and values
    return runner, blocks


class RunnerBench:
    """Runs steps of sequences that exist in the block tables only."""

    def __init__(self, runner: ModelRunner, model: ModelConfig, blocks: int) -> None:
        self._runner = runner
        self._model = model
        self._blocks = blocks
        self._names = itertools.count()

    def fits(self, batch: int, context: int) -> bool:
        return batch * self._per_sequence(context) <= self._blocks

    def decode_s(self, batch: int, context: int, ahead: bool) -> float:
        """Seconds per step. `ahead`: recorded, each step begun before the last one's tokens are read."""
        self._runner.graphs_enabled = ahead
        try:
            with _Sequences(self, batch, context) as sequences:
                for _ in range(WARM_STEPS):
                    sequences.step(ahead)
                sequences.settle()
                began = time.perf_counter()
                steps = 0
                while (steps < MOST_STEPS and time.perf_counter() - began < STEPS_S) or steps < 2:
                    sequences.step(ahead)
                    steps += 1
                sequences.settle()
                return (time.perf_counter() - began) / steps
        finally:
            self._runner.graphs_enabled = True

    def outside_kernels(self, batch: int, context: int, step_s: float, steps: int = 8) -> float | None:
        """Share of a step in which the GPU runs no kernel; None where the profiler cannot say."""
        from torch.profiler import ProfilerActivity, profile

        with _Sequences(self, batch, context) as sequences:
            for _ in range(WARM_STEPS):
                sequences.step(True)
            sequences.settle()
            try:
                with profile(activities=[ProfilerActivity.CUDA]) as found:
                    for _ in range(steps):
                        sequences.step(True)
                    sequences.settle()
                    torch.cuda.synchronize()
                events: Any = found.events()
                on_gpu = [event for event in events if event.device_type.name == "CUDA"]
                busy_s = sum(event.time_range.elapsed_us() for event in on_gpu) / 1e6 / steps
            except RuntimeError:
                sequences.settle()
                return None
        return max(0.0, 1.0 - busy_s / step_s) if busy_s > 0 else None

    def prefill_s(self, tokens: int, repeats: int = 3) -> float:
        """Seconds of a prompt, the best of some: the device's clock rises with the first."""
        times = []
        for _ in range(repeats + 1):
            key = f"bench {next(self._names)}"
            ids = [(7 * place + 11) % self._model.vocab_size for place in range(tokens)]
            item = StepItem(key, ids, 0, list(range(self._per_sequence(tokens))))
            step = StepInput([item], [Joining(key, SamplingParams(), tokens, ids)])
            times.append(_timed(lambda step=step: self._runner.execute(step)))  # type: ignore[misc]
            self._runner.execute(StepInput([], leaving=[key]))
        return min(times[1:])

    def _per_sequence(self, context: int) -> int:
        return -(-(context + WARM_STEPS + MOST_STEPS) // BLOCK)


class _Sequences:
    """A decode batch that goes on from `context` tokens."""

    def __init__(self, bench: RunnerBench, batch: int, context: int) -> None:
        self._runner = bench._runner
        per_sequence = bench._per_sequence(context)
        self._keys = [f"bench {next(bench._names)}" for _ in range(batch)]
        self._tables = [list(range(i * per_sequence, (i + 1) * per_sequence)) for i in range(batch)]
        self._place = context - 1
        self._tokens = [11] * batch
        self._running: Any = None

    def __enter__(self) -> _Sequences:
        joining = [Joining(key, SamplingParams(), self._place, []) for key in self._keys]
        self._runner.execute(StepInput([], joining))
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.execute(StepInput([], leaving=self._keys))

    def step(self, ahead: bool) -> None:
        """One step; with `ahead` the one before is collected afterwards."""
        items = [
            StepItem(key, [token], self._place, table)
            for key, token, table in zip(self._keys, self._tokens, self._tables, strict=True)
        ]
        self._place += 1
        before, self._running = self._running, self._runner.begin(StepInput(items))
        if before is not None:
            before.result()
        if ahead:
            self._tokens = [LAST_SAMPLED] * len(items)
        else:
            self._collect()

    def settle(self) -> None:
        """Until the device has nothing to do, and the next step gets its tokens from here."""
        if self._running is not None:
            self._collect()

    def _collect(self) -> None:
        self._tokens = self._running.result().tokens
        self._running = None


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
