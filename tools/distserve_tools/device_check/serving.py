"""Prefill and decode as two instances on the one device, through the real tritonserver."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig
from distserve.worker.executor import make_executor
from distserve.worker.step import Joining, SamplingParams, StepInput, StepItem
from distserve_planner.generate import generate
from distserve_planner.placement_file import parse_placement
from distserve_tools.client import Client, Completion
from distserve_tools.console import StepLines
from distserve_tools.device_check.profiling import checkpoint
from distserve_tools.device_check.settings import Settings
from distserve_tools.launch import ServerOptions
from distserve_tools.stack import running

BLOCK = 16
CONCURRENT = {"device": 16, "small": 3}
PROMPT = {"device": 512, "small": 40}
OUTPUT = {"device": 64, "small": 12}
KV_BYTES = {"device": 4 << 30, "small": 16 << 20}
START_S = 120.0


def run(settings: Settings) -> dict[str, Any]:
    """Latencies of concurrent requests, and the share of tokens that one engine alone gives as well."""
    folder = checkpoint(settings)
    model = ModelConfig.load(folder)
    prompts = [_prompt(model, PROMPT[settings.scale], seed) for seed in range(CONCURRENT[settings.scale])]
    repository = Path(settings.folder) / "repository"
    generate(parse_placement(placement(settings, folder), "device-check"), repository)
    with running(ServerOptions(repository=repository, start_timeout_s=START_S), StepLines()) as stack:
        assert stack.client is not None
        completions = _serve(stack.client, prompts, OUTPUT[settings.scale])
        instances = stack.client.control("status")["instances"]
    alone = _alone(settings, folder, model, prompts[0], OUTPUT[settings.scale])
    pairs = list(zip(completions[0].token_ids, alone, strict=True))
    first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
    return {
        "requests": len(completions),
        "output_tokens": sum(len(c.token_ids) for c in completions),
        "ttft_ms": _median(c.ttft_s for c in completions),
        "tpot_ms": _median(c.tpot_s for c in completions),
        "transfer_ms": _median(float(c.stage_times["transfer_s"]) for c in completions),
        "tokens_like_one_engine": first,
        "tokens_compared": len(pairs),
        "attention": sorted({str(entry.get("attention")) for entry in instances}),
        "rows": [],
    }


def placement(settings: Settings, folder: Path) -> str:
    """Both instances on the device, which has to be allowed by name."""
    common = {
        "devices": [settings.device],
        "kv_bytes": KV_BYTES[settings.scale],
        "max_batch_size": CONCURRENT[settings.scale],
    }
    return json.dumps(
        {
            "schema": "placement/1",
            "model": str(folder),
            "dtype": settings.dtype,
            "block_size": BLOCK,
            "oversubscribe": True,
            "instances": [
                {"role": "prefill", **common},
                {"role": "decode", "decode_graphs": True, **common},
            ],
        }
    )


def _prompt(model: ModelConfig, length: int, seed: int) -> list[int]:
    return [3 + (31 * place + 17 * seed) % min(200, model.vocab_size - 3) for place in range(length)]


def _serve(client: Client, prompts: Sequence[list[int]], count: int) -> list[Completion]:
    """One request first, so that what is done once has been done; then all together."""
    options: dict[str, Any] = {"max_tokens": count, "temperature": 0, "ignore_eos": True}
    client.complete(prompts[0], **options)
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: client.complete(prompt, **options), prompts))


def _alone(settings: Settings, folder: Path, model: ModelConfig, prompt: list[int], count: int) -> list[int]:
    """The tokens of one engine that does both phases, in this process and without graphs."""
    values: dict[str, Any] = {
        "instance": "alone",
        "role": "unified",
        "model": str(folder),
        "devices": [settings.device],
    }
    values |= {"dtype": settings.dtype, "block_size": BLOCK, "decode_graphs": False}
    blocks = -(-(len(prompt) + count) // BLOCK)
    executor = make_executor(EngineConfig.load({**values, "num_blocks": blocks}), model)
    tokens, computed = list(prompt), 0
    joining = [Joining("alone", SamplingParams(), len(prompt), list(prompt))]
    while len(tokens) < len(prompt) + count:
        item = StepItem("alone", tokens[computed:], computed, list(range(blocks)))
        computed = len(tokens)
        tokens += executor.execute(StepInput([item], joining)).tokens
        joining = []
    executor.close()
    return tokens[len(prompt) :]


def _median(seconds: Iterable[float]) -> float:
    """In milliseconds."""
    return 1e3 * statistics.median(seconds)
