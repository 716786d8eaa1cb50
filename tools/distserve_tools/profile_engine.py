"""Measures this device with the real engine and fits the planner's latency model to it."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from distserve.core.config import DTYPE_BYTES, EngineConfig
from distserve.core.model_config import ModelConfig, resolve_model
from distserve.core.parsing import ConfigError, to_mapping
from distserve_planner.coefficients import Degree
from distserve_planner.fit import fit_decode, fit_prefill, measured_lm, poor_fits
from distserve_planner.profile_file import Profile
from distserve_tools.engine_sweep import EngineSweep, SweepPlan

if TYPE_CHECKING:
    from distserve.worker.executor import Executor

EXAMPLES = """\
examples:
  distserve profile --model cache:smollm2-135m-instruct --out cpu.yaml
  distserve profile --model ./Llama-3-8B --device cuda:0 --dtype bf16 --out h100.yaml
  distserve profile --model cache:smollm2-135m-instruct --quick --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `distserve profile`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("--model", required=True, help="a Hugging Face folder or cache:NAME")
    parser.add_argument("--device", default="cpu:0", help="cpu:0, cpu:0-3, cuda:0 (%(default)s)")
    parser.add_argument("--dtype", choices=tuple(DTYPE_BYTES), help="default: fp32 on a CPU, bf16 on a GPU")
    parser.add_argument("--name", help="how cluster files will name this device (default: the machine's)")
    parser.add_argument("--out", metavar="FILE", help="where to write the profile (schema: profile/1)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller points")
    parser.add_argument("--repeats", type=int, help="timed repetitions of every point")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a KV block (%(default)s)")
    parser.add_argument("--kv-bytes", type=int, default=1 << 30, help="KV pool to measure in (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs `distserve profile`; raises `ConfigError` for anything refused."""
    # torch's thread count is set by bind_device, before anything else of torch runs
    from distserve.worker.device import bind_device, parse_device

    device = parse_device(args.device)
    bind_device(device)
    dtype = args.dtype or ("fp32" if device.kind == "cpu" else "bf16")
    plan = _plan(args)
    console = Console(stderr=True)
    config = EngineConfig.load(
        {
            "instance": "profile",
            "role": "unified",
            "model": args.model,
            "devices": [args.device],
            "dtype": dtype,
            "block_size": args.block_size,
            "kv_bytes": args.kv_bytes,
            "max_batch_size": max(plan.batches),
        },
        "profile",
    )
    profile = measure(config, plan, console, name=args.name or machine_name(args.device))
    for warning in poor_fits(profile.residuals):
        console.print(f"warning: {warning}", style="yellow")
    if args.out:
        profile.save(args.out)
    if args.json:
        sys.stdout.write(json.dumps(to_mapping(profile), indent=2) + "\n")
    else:
        _report(profile, args.out)
    return 0


def measure(config: EngineConfig, plan: SweepPlan, console: Console, *, name: str) -> Profile:
    """Loads the model, runs the sweep and fits. `console` shows the progress."""
    from distserve.worker.executor import make_executor

    model = ModelConfig.load(resolve_model(config.model))
    with console.status(f"loading {config.model}"):
        executor = make_executor(config, model)
    try:
        return _measured(executor, config, model, plan, console, name)
    finally:
        executor.close()


def _measured(
    executor: Executor,
    config: EngineConfig,
    model: ModelConfig,
    plan: SweepPlan,
    console: Console,
    name: str,
) -> Profile:
    fill_cache(executor)
    sweep = EngineSweep(executor, model, plan, config.block_size)
    context = min(config.max_context or model.max_context, model.max_context)
    prefills = plan.prefill_points(context, sweep.pool_tokens)
    decodes = plan.decode_points(context, sweep.pool_tokens)
    with _progress(console, {"prefill": len(prefills), "decode": len(decodes)}) as advance:
        prefill_points = sweep.prefill(prefills, lambda: advance("prefill"))
        decode_points = sweep.decode(decodes, lambda: advance("decode"))
    prefill, decode = fit_prefill(prefill_points, config.tp), fit_decode(decode_points, config.tp)
    singles = [(p.tokens, p.seconds) for p in prefill_points if p.requests == 1]
    residuals = (prefill.residual, decode.residual)
    return Profile(
        device=name,
        model_name=config.model,
        model=model,
        dtype=config.dtype,
        degrees=(Degree(config.tp, prefill.pieces, decode.pieces),),
        lm_tokens=measured_lm(singles),
        residuals=residuals,
        source=f"measured by distserve profile, attention {executor.attention}",
        notes=tuple(poor_fits(residuals)),
    )


def fill_cache(executor: Executor) -> None:
    """Random keys and values in every page: what a page holds by chance may be slow numbers (denormals)."""
    import torch

    generator = torch.Generator(executor.kv_cache.pages(0)[0].device).manual_seed(0)
    for layer in range(executor.kv_cache.num_layers):
        for pages in executor.kv_cache.pages(layer):
            pages.normal_(generator=generator)


def machine_name(device: str) -> str:
    """The GPU's name, or the processor's with its number of cores in use."""
    from distserve.worker.device import parse_device

    parsed = parse_device(device)
    if parsed.kind != "cpu":
        import torch

        return str(torch.cuda.get_device_name(parsed.index))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} x{len(parsed.cores)}"


def _plan(args: argparse.Namespace) -> SweepPlan:
    plan = SweepPlan.quick() if args.quick else SweepPlan()
    if args.repeats is None:
        return plan
    if args.repeats < 1:
        raise ConfigError(f"--repeats={args.repeats}: must be at least 1")
    return replace(plan, repeats=args.repeats)


@contextmanager
def _progress(console: Console, totals: Mapping[str, int]) -> Iterator[Callable[[str], None]]:
    """A bar per kind of point; gives a function that moves one on."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tasks = {name: progress.add_task(name, total=total) for name, total in totals.items()}
        yield lambda name: progress.advance(tasks[name])


def _report(profile: Profile, out: str | None) -> None:
    console = Console()
    table = Table(title=f"{profile.model_name} on {profile.device}, {profile.dtype}")
    for column in ("fit", "points", "error p50", "error p95"):
        table.add_column(column, justify="left" if column == "fit" else "right")
    for r in profile.residuals:
        table.add_row(f"{r.phase} tp={r.tp}", str(r.points), f"{r.p50:.1%}", f"{r.p95:.1%}")
    console.print(table)
    degree = profile.degrees[0]
    for tokens in (128, 512):
        seconds = degree.prefill_seconds(tokens, tokens**2, 1)
        console.print(f"prefill of {tokens} tokens: {seconds * 1e3:.1f} ms, {tokens / seconds:.0f} tokens/s")
    for batch in (1, 8):
        step = degree.decode_seconds(batch, 256 * batch)
        console.print(f"decode step of {batch} at 256 tokens: {step * 1e3:.1f} ms")
    console.print(f"Lm: {profile.lm_tokens} tokens")
    if out:
        console.print(f"wrote {out}")
