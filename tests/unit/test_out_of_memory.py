"""A step that finds no memory fails its batch; the engine goes on."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig
from distserve.worker import footprint
from distserve.worker.decode_graphs import DecodeGraphs
from distserve.worker.executor import make_executor
from distserve.worker.runner import ModelRunner
from distserve.worker.step import Joining, SamplingParams, StepInput, StepItem
from model_zoo import Zoo, make_checkpoint, prompt

SPARE = 150 << 20  # of address space; a long prompt's activations take 640 MB, a short one's 2 MB

SERVE = """
import resource, sys
from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig
from distserve.engine.loop import EngineLoop
from distserve.worker.executor import make_executor
from engine_node import BLOCK, Node

folder, graphs = sys.argv[1], sys.argv[2] == "graphs"
node = Node("unified", num_blocks=400)
values = {"instance": "t", "role": "unified", "model": folder, "block_size": BLOCK, "num_blocks": 400}
config = EngineConfig.load({**values, "decode_graphs": graphs, "max_batch_size": 8})
executor = make_executor(config, ModelConfig.load(folder))
node.loop = EngineLoop(node.role, executor, node.inbox, lambda: node.now)

def serve(id, length, count):
    node.submit(id, [7 + i % 80 for i in range(length)], count)
    node.until(lambda: node.over(id))
    return node.last(id), node.tokens(id)

_, before = serve("before", 5, 6)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE, -1))
last, tokens = serve("long", 900, 2)
assert last["error"]["code"] == "INTERNAL", last
assert "memory" in last["error"]["message"], last
assert not tokens
_, after = serve("after", 5, 6)
assert after == before, (before, after)
assert node.loop.counters.failed_steps == 1
node.assert_empty()
print("served")
""".replace("SPARE", str(SPARE))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLP that makes 720 KB of a token; the last layer computes only the tokens that are sampled from."""
    changes = {"intermediate_size": 60000, "num_hidden_layers": 2, "max_position_embeddings": 1024}
    return make_checkpoint(tmp_path_factory.mktemp("wide") / "m", "llama", overrides=changes).folder


@pytest.mark.parametrize("steps", ["plain", "graphs"])
def test_no_memory_for_a_long_prompt_fails_that_alone(wide: Path, steps: str) -> None:
    """The limit is the system's, of the process's address space."""
    command = [sys.executable, "-c", SERVE, str(wide), steps]
    tests = Path(__file__).parents[1]
    environment = {"PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.stdout == "served\n", done.stderr[-3000:]


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"role": "unified"}, 512),
        ({"role": "unified", "max_batch_tokens": 100}, 256),
        ({"role": "decode", "max_context": 100, "max_batch_tokens": 80}, 100),
        ({"role": "prefill", "max_batch_tokens": 512}, 512),
        ({"role": "prefill", "max_batch_tokens": 32, "prefill_chunk_tokens": 48}, 48),
        ({"role": "unified", "policy": "chunked_prefill", "chunk_tokens": 40}, 40),
    ],
)
def test_the_largest_steps_are_run_to_find_what_they_take(
    zoo: Zoo, changes: dict[str, object], tokens: int
) -> None:
    model = ModelConfig.load(zoo("llama").folder)
    values = {"instance": "t", "role": "unified", "model": str(zoo("llama").folder), "max_batch_size": 5}
    config = EngineConfig.load({**values, **changes})
    context = config.max_context or model.max_context
    assert footprint.largest_prompt(config, context) == tokens
    step = footprint.prompt_step(tokens, context, config.block_size)
    assert sum(len(item.tokens) for item in step.items) == tokens
    assert max(len(item.tokens) for item in step.items) <= context
    runner = ModelRunner(config, model)
    ran = []

    def measure(work) -> int:  # type: ignore[no-untyped-def]
        ran.append(work())
        return len(ran)

    assert runner.run_largest(measure) == (1, 2)
    assert [len(output.tokens) for output in ran] == [len(step.items), 5]
    assert len(runner._sampler) == 0


def test_the_largest_graphs_are_recorded_to_find_what_all_take(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo("llama").folder
    values = {"instance": "t", "role": "unified", "model": str(folder), "decode_graphs": True}
    runner = ModelRunner(EngineConfig.load({**values, "max_batch_size": 80}), ModelConfig.load(folder))
    recorded: list[tuple[int, int]] = []
    step = DecodeGraphs._step

    def note(self: DecodeGraphs, bucket: int, width: int) -> None:
        recorded.append((bucket, width))
        step(self, bucket, width)

    def driver_bytes(work: Callable[[], object], device: torch.device) -> int:
        recorded.clear()
        work()
        return 7 * len(recorded)

    monkeypatch.setattr(DecodeGraphs, "_step", note)
    monkeypatch.setattr(footprint, "driver_bytes", driver_bytes)
    found = runner._graph_bytes()
    tried = set(recorded)
    assert len(tried) == len(recorded) // 2, "each is recorded and run"
    recorded.clear()
    runner.allocate(64)
    assert tried < set(recorded)
    assert found == 2 * 7 * len(recorded), "as many as are recorded in the end"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_pool_leaves_room_for_the_largest_steps(zoo: Zoo) -> None:
    """Of a device that is nearly full, a pool takes what the measurement leaves, and no step then fails."""
    device = torch.device("cuda:0")
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    room = int(footprint.MARGIN_SHARE * total) + (400 << 20)
    occupied = torch.empty(torch.cuda.mem_get_info(device)[0] - room, dtype=torch.uint8, device=device)
    folder = zoo("llama").folder
    values = {
        "instance": "t",
        "role": "unified",
        "model": str(folder),
        "devices": ["cuda:0"],
        "dtype": "bf16",
    }
    config = EngineConfig.load({**values, "max_batch_size": 4096})
    executor = make_executor(config, ModelConfig.load(folder))
    useful = config.max_batch_size * 256 // config.block_size
    assert 1 <= executor.num_blocks < useful  # the memory decides
    for step in (
        footprint.prompt_step(footprint.largest_prompt(config, 256), 256, config.block_size),
        footprint.decode_step(config.max_batch_size, 256, config.block_size),
    ):
        assert len(executor.execute(step).tokens) == len(step.items)
        executor.execute(footprint.leaving(step))
    del occupied


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_full_gpu_fails_the_step_and_serves_the_next(zoo: Zoo) -> None:
    """The allocator's own limit; nothing that was free before is kept in pieces."""
    device = torch.device("cuda:0")
    folder = zoo("llama").folder
    values = {
        "instance": "t",
        "role": "unified",
        "model": str(folder),
        "devices": ["cuda:0"],
        "num_blocks": 64,
    }
    executor = make_executor(EngineConfig.load(values), ModelConfig.load(folder))

    def step(key: str, length: int) -> StepInput:
        tokens = prompt(length)
        item = StepItem(key, tokens, 0, list(range(-(-length // 16))))
        return StepInput([item], [Joining(key, SamplingParams(), length, tokens)])

    expected = executor.execute(step("before", 20)).tokens
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    filler = []
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(device) / total, device)
    try:
        for size in (1 << 20, 1 << 16, 1 << 9):  # until not a piece is left
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    filler.append(torch.empty(size, dtype=torch.uint8, device=device))
        with pytest.raises(torch.OutOfMemoryError):
            executor.execute(step("long", 256))
    finally:
        filler.clear()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert executor.execute(step("after", 20)).tokens == expected
