"""One engine in one process, timed step by step: `python worker.py SPEC`, requests and replies as JSON lines.

Run by path, so that it works in a peer's own virtual environment: it imports nothing of this package, and
every engine only when it is the one. Requests on stdin: {"op": "prefill"}, {"op": "start", "batch"},
{"op": "steps", "count"}, {"op": "stop"}. Each reply is one line on a descriptor of its own.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

VOCAB_LOW = 100  # prompts leave out the special tokens below


class Engine(Protocol):
    """What is timed. Prompts are random ids; decoding goes on for as long as it is stepped."""

    def describe(self) -> str:
        """Version and settings, for the report."""
        ...

    def prefill(self, prompt: list[int]) -> None:
        """Computes one prompt and its first token, and forgets it."""
        ...

    def start(self, prompts: list[list[int]]) -> None:
        """Brings these sequences to the point where the next step decodes all of them."""
        ...

    def step(self) -> None:
        """One token for every sequence."""
        ...

    def stop(self) -> None:
        """Forgets the sequences."""
        ...


class DistServe:
    """This package's engine: the loop that serves, with scheduler, runner and sampler."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from distserve.core.blocks import BlockManager
        from distserve.core.config import EngineConfig
        from distserve.core.model_config import ModelConfig
        from distserve.core.scheduler import Limits
        from distserve.core.unified_scheduler import UnifiedScheduler
        from distserve.engine.inbox import Inbox
        from distserve.engine.loop import EngineLoop
        from distserve.engine.ops import Op
        from distserve.engine.requests import Owner
        from distserve.engine.roles import UnifiedRole
        from distserve.worker.executor import make_executor

        tokens = spec["sequences"] * (spec["context"] + spec["room"])
        config = EngineConfig(
            instance="bench",
            role="unified",
            model=spec["model"],
            dtype=spec["dtype"],
            num_blocks=tokens // 16 + spec["sequences"] + 1,
            max_batch_tokens=spec["context"],
        )
        self._executor = make_executor(config, ModelConfig.load(spec["model"]))
        blocks = BlockManager(self._executor.num_blocks, config.block_size)
        self._inbox: Inbox[Op] = Inbox()
        role = UnifiedRole(UnifiedScheduler(Limits.of(config), blocks), blocks)
        self._loop = EngineLoop(role, self._executor, self._inbox)
        self._owner = Owner("bench", 1)
        self._room = int(spec["room"])
        self._names = 0
        self._running: tuple[str, ...] = ()

    def describe(self) -> str:
        return f"this engine, attention {self._executor.attention}"

    def publish(self, events: Any, load: Any) -> None:
        """Where the loop's events end: nobody listens here."""

    def prefill(self, prompt: list[int]) -> None:
        self._submit(prompt, 1)
        self._loop.turn(self)

    def start(self, prompts: list[list[int]]) -> None:
        self._running = tuple(self._submit(prompt, self._room) for prompt in prompts)
        for _ in prompts:
            self._loop.turn(self)

    def step(self) -> None:
        self._loop.turn(self)

    def stop(self) -> None:
        from distserve.engine.ops import Manage

        self._inbox.post(Manage("cancel", self._owner, self._running))
        self._loop.turn(self)

    def _submit(self, prompt: list[int], max_tokens: int) -> str:
        from distserve.core.request import Request
        from distserve.engine.ops import Submit
        from distserve.engine.requests import EngineRequest
        from distserve.worker.step import SamplingParams

        self._names += 1
        name = f"r{self._names}"
        request = Request(name, len(prompt), max_tokens, tokens=list(prompt))
        state = EngineRequest(name, self._owner, request, SamplingParams(), time.monotonic())
        self._inbox.post(Submit(state))
        return name


class Transformers:
    """Hugging Face transformers as `generate` runs it: SDPA attention, DynamicCache, arg max."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import torch
        import transformers

        self._torch, self._version = torch, transformers.__version__
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[spec["dtype"]]
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model: Any = load(spec["model"], dtype=dtype, attn_implementation="sdpa")
        self._model.train(False)
        torch.set_grad_enabled(False)
        self._cache: Any = None
        self._ids: Any = None

    def describe(self) -> str:
        return f"transformers {self._version}, sdpa, DynamicCache"

    def _forward(self, ids: Any, cache: Any) -> tuple[Any, Any]:
        with self._torch.inference_mode():
            out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values

    def prefill(self, prompt: list[int]) -> None:
        self._forward(self._torch.tensor([prompt]), None)

    def start(self, prompts: list[list[int]]) -> None:
        self._ids, self._cache = self._forward(self._torch.tensor(prompts), None)

    def step(self) -> None:
        self._ids, self._cache = self._forward(self._ids, self._cache)
        self._ids.tolist()

    def stop(self) -> None:
        self._cache = self._ids = None


class Vllm:
    """vLLM's engine stepped in this process: continuous batching, compiled model, its own defaults."""

    def __init__(self, spec: dict[str, Any]) -> None:
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, spec["cores"])),
            VLLM_CPU_KVCACHE_SPACE="2",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="WARNING",
        )
        import vllm  # type: ignore[import-not-found,unused-ignore]

        self._vllm = vllm
        self._engine = vllm.LLM(
            spec["model"],
            dtype={"fp32": "float32", "bf16": "bfloat16"}[spec["dtype"]],
            skip_tokenizer_init=True,
            max_model_len=spec["context"] + spec["room"],
            max_num_batched_tokens=max(2048, spec["context"]),
            max_num_seqs=64,
            enable_prefix_caching=False,
        ).llm_engine
        self._room = int(spec["room"])
        self._names = 0
        self._running: list[str] = []

    def describe(self) -> str:
        return f"vLLM {self._vllm.__version__}, prefix caching off, else its defaults"

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        self._names += 1
        name = f"r{self._names}"
        params = self._vllm.SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def prefill(self, prompt: list[int]) -> None:
        self._add(prompt, 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def start(self, prompts: list[list[int]]) -> None:
        self._running = [self._add(prompt, self._room - 1) for prompt in prompts]
        produced: set[str] = set()
        while len(produced) < len(prompts):
            produced |= {out.request_id for out in self._engine.step() if out.outputs[0].token_ids}

    def step(self) -> None:
        self._engine.step()

    def stop(self) -> None:
        self._engine.abort_request(self._running)
        while self._engine.has_unfinished_requests():
            self._engine.step()


ENGINES: dict[str, Callable[[dict[str, Any]], Engine]] = {
    "distserve": DistServe,
    "transformers": Transformers,
    "vllm": Vllm,
}


def timed(call: Callable[[], None]) -> dict[str, float]:
    """Seconds of one call: by the clock on the wall, and of processor time of all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def serve(spec: dict[str, Any], engine: Engine) -> None:
    """Answers requests until stdin ends. Replies go to the file descriptor `spec["reply_fd"]`."""
    rng = random.Random(0)
    with os.fdopen(spec["reply_fd"], "w") as replies:

        def prompt() -> list[int]:
            return [rng.randrange(VOCAB_LOW, spec["vocab"]) for _ in range(spec["context"])]

        def reply(value: object) -> None:
            replies.write(json.dumps(value) + "\n")
            replies.flush()

        reply({"about": engine.describe()})
        for line in sys.stdin:
            request = json.loads(line)
            if request["op"] == "prefill":
                ids = prompt()
                reply([timed(lambda ids=ids: engine.prefill(ids))])  # type: ignore[misc]
            elif request["op"] == "start":
                engine.start([prompt() for _ in range(request["batch"])])
                reply([])
            elif request["op"] == "steps":
                reply([timed(engine.step) for _ in range(request["count"])])
            else:
                engine.stop()
                reply([])


def main() -> None:
    spec = json.loads(sys.argv[1])
    os.sched_setaffinity(0, spec["cores"])
    os.environ["OMP_NUM_THREADS"] = str(len(spec["cores"]))
    import torch

    torch.set_num_threads(len(spec["cores"]))
    serve(spec, ENGINES[spec["engine"]](spec))


if __name__ == "__main__":
    main()
