"""Measures this device with the real engine and fits the planner's latency model to it."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from distserve.core.config import DTYPE_BYTES, EngineConfig
from distserve.core.model_config import ModelConfig, resolve_model
from distserve.core.parsing import ConfigError, to_mapping
from distserve_planner.coefficients import Degree
from distserve_planner.fit import fit_decode, fit_head, fit_prefill, measured_lm, poor_fits, with_pieces
from distserve_planner.profile_file import Profile, Residual
from distserve_tools.engine_sweep import EngineSweep, SweepPlan

if TYPE_CHECKING:
    from distserve.worker.executor import Executor

EXAMPLES = """\
examples:
  distserve profile --model cache:smollm2-135m-instruct --out cpu.yaml
  distserve profile --model ./Llama-3-8B --device cuda:0 cuda:1 --tp 1 2 --dtype bf16 --out h100.yaml
  distserve profile --model cache:smollm2-135m-instruct --quick --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `distserve profile`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("--model", required=True, help="a Hugging Face folder or cache:NAME")
    parser.add_argument(
        "--device", nargs="+", default=["cpu:0"], help="cpu:0, cpu:0-3, cuda:0; one for every rank (cpu:0)"
    )
    parser.add_argument(
        "--tp", nargs="+", type=int, default=[1], help="tensor-parallel degrees; others are predicted (1)"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPE_BYTES), help="default: fp32 on a CPU, bf16 on a GPU")
    parser.add_argument("--name", help="how cluster files will name this device (default: the machine's)")
    parser.add_argument("--out", metavar="FILE", help="where to write the profile (schema: profile/1)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller points")
    parser.add_argument("--repeats", type=int, help="timed repetitions of every point")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a KV block (%(default)s)")
    parser.add_argument("--kv-bytes", type=int, default=1 << 30, help="KV pool to measure in (%(default)s)")
    parser.add_argument("--no-transfer", action="store_true", help="do not measure the KV transfer")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs `distserve profile`; raises `ConfigError` for anything refused."""
    # torch's thread count is set by bind_device, before anything else of torch runs
    from distserve.worker.device import bind_device, parse_device

    device = parse_device(args.device[0])
    bind_device(device)
    plan = _plan(args)
    console = Console(stderr=True)
    configs = [_config(args, tp, device.kind, max(plan.batches)) for tp in sorted(set(args.tp))]
    profile = measure(configs, plan, console, name=args.name or machine_name(args.device[0]))
    if not args.no_transfer:
        profile = with_transfer(profile, configs[0], console)
    for warning in poor_fits(profile.residuals):
        console.print(f"warning: {warning}", style="yellow")
    if args.out:
        profile.save(args.out)
    if args.json:
        sys.stdout.write(json.dumps(to_mapping(profile), indent=2) + "\n")
    else:
        _report(profile, args.out)
    return 0


def measure(configs: Sequence[EngineConfig], plan: SweepPlan, console: Console, *, name: str) -> Profile:
    """Runs the sweep once per configuration (they differ in tp only) and fits. `console` shows progress.

    Raises `ConfigError` for what the engine refuses and for too few points to fit.
    """
    first = configs[0]
    model = ModelConfig.load(resolve_model(first.model))
    measured = [_measure_degree(config, model, plan, console) for config in configs]
    residuals = tuple(r for m in measured for r in m.residuals)
    return Profile(
        device=name,
        model_name=first.model,
        model=model,
        dtype=first.dtype,
        degrees=tuple(m.degree for m in measured),
        lm_tokens=measured[0].lm_tokens,
        residuals=residuals,
        source=f"measured by distserve profile, attention {measured[0].attention}",
        notes=tuple(poor_fits(residuals)),
    )


def with_transfer(profile: Profile, config: EngineConfig, console: Console) -> Profile:
    """The profile with the measured KV transfer, or with a note why there is none."""
    from distserve_tools.transfer_sweep import TransferPeers, measure_transfer, other_device

    source = other_device(config.devices[0])
    peers = TransferPeers(config, profile.model, source)
    try:
        with _progress(console, {"transfer": len(peers.tokens)}) as advance:
            link, error = measure_transfer(peers, lambda: advance("transfer"))
    except ConfigError as failure:  # the steps have been measured: better a profile without than none
        console.print(f"warning: {failure}", style="yellow")
        return replace(profile, notes=(*profile.notes, f"KV transfer not measured: {failure}"))
    notes = (
        *profile.notes,
        f"transfer: {'CUDA IPC' if 'cuda' in source else 'shared memory'}, {source} to {config.devices[0]}",
        *poor_fits([error]),
    )
    return replace(profile, transfer=link, residuals=(*profile.residuals, error), notes=notes)


@dataclass(frozen=True)
class _Measured:
    degree: Degree
    residuals: tuple[Residual, Residual]
    lm_tokens: int
    attention: str


def _measure_degree(config: EngineConfig, model: ModelConfig, plan: SweepPlan, console: Console) -> _Measured:
    from distserve.worker.executor import make_executor

    with console.status(f"loading {config.model}"):
        executor = make_executor(config, model)
    try:
        fill_cache(executor)
        sweep = EngineSweep(executor, model, plan, config.block_size)
        prefills = plan.prefill_points(model.max_context, sweep.pool_tokens)
        pieces = plan.piece_points(model.max_context, sweep.pool_tokens)
        decodes = plan.decode_points(model.max_context, sweep.pool_tokens)
        labels = tuple(f"{name} tp={config.tp}" for name in ("prefill", "pieces", "decode"))
        totals = dict(zip(labels, map(len, (prefills, pieces, decodes)), strict=True))
        with _progress(console, totals) as advance:
            prefill_points = sweep.prefill(prefills, lambda: advance(labels[0]))
            piece_points = sweep.pieces(pieces, lambda: advance(labels[1]))
            decode_points = sweep.decode(decodes, lambda: advance(labels[2]))
    finally:
        executor.close()
    head = fit_head(piece_points, decode_points)
    prefill = fit_prefill(with_pieces(prefill_points, piece_points), config.tp, head)
    decode = fit_decode(decode_points, config.tp, head)
    return _Measured(
        Degree(config.tp, prefill.pieces, decode.pieces, head),
        (prefill.residual, decode.residual),
        measured_lm([(p.tokens, p.seconds) for p in prefill_points if p.requests == 1]),
        executor.attention,
    )


def _config(args: argparse.Namespace, tp: int, kind: str, max_batch: int) -> EngineConfig:
    if not 1 <= tp <= len(args.device):
        raise ConfigError(f"--tp={tp}: from 1 to the number of devices, --device={' '.join(args.device)}")
    return EngineConfig.load(
        {
            "instance": "profile",
            "role": "unified",
            "model": args.model,
            "devices": args.device[:tp],
            "tp": tp,
            "dtype": args.dtype or ("fp32" if kind == "cpu" else "bf16"),
            "block_size": args.block_size,
            "kv_bytes": args.kv_bytes,
            "max_batch_size": max_batch,
        },
        "profile",
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
    if profile.transfer:
        console.print(
            f"KV transfer: {profile.transfer.bandwidth_bytes_s / 1e9:.2f} GB/s, "
            f"{profile.transfer.latency_s * 1e3:.1f} ms"
        )
    if out:
        console.print(f"wrote {out}")
