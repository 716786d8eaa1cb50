"""What the planning commands print: progress, objectives, and the figures of one simulated rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from distserve_planner.search.diagnosis import Diagnosis
from distserve_planner.slo import Slo, seconds

_BLOCKS = " ▁▂▃▄▅▆▇█"


@contextmanager
def bars(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar per stage, gone at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done)

        yield tell


def slo_line(slo: Slo) -> str:
    """Objectives in words."""
    share = f"{100 * slo.attainment:g} % of requests"
    return f"TTFT {seconds(slo.ttft_s)}, TPOT {seconds(slo.tpot_s)}, both for {share}"


def print_diagnosis(console: Console, look: Diagnosis, slo: Slo) -> None:
    """Attainment with its interval, percentiles, stages, usage and the queue over time."""
    seen = look.attainment
    console.print(
        f"at {look.rate:.4g} requests/s: both objectives {100 * seen.both:.1f} % "
        f"(95 % interval {100 * seen.low:.1f} to {100 * seen.high:.1f}), TTFT {100 * seen.ttft:.1f} %, "
        f"TPOT {100 * seen.tpot:.1f} %, of {seen.requests} requests",
        highlight=False,
    )
    table = Table("", *(f"P{p}" for p in look.ttft_s), "objective")
    table.add_row("TTFT", *(seconds(v) for v in look.ttft_s.values()), seconds(slo.ttft_s))
    table.add_row("TPOT", *(seconds(v) for v in look.tpot_s.values()), seconds(slo.tpot_s))
    console.print(table)
    total = sum(look.stages_s.values()) or 1.0
    stages = ", ".join(f"{name} {seconds(v)} ({100 * v / total:.1f} %)" for name, v in look.stages_s.items())
    console.print(f"mean stages: {stages}", highlight=False)
    use = look.usage
    shares = [
        ("prefill devices", use.prefill_device),
        ("decode devices", use.decode_device),
        ("devices", use.unified_device),
        ("prefill KV", use.prefill_kv),
        ("decode KV", use.decode_kv),
        ("busiest link", use.link),
    ]
    text = ", ".join(f"{name} {100 * value:.0f} %" for name, value in shares if value is not None)
    console.print(f"in use: {text}", highlight=False)
    for name, queue in (("prefill", look.prefill_queue), ("decode", look.decode_queue)):
        console.print(f"queue for {name}, most {max(queue, default=0)}: {_spark(queue)}", highlight=False)
    if look.preemptions:
        console.print(f"{look.preemptions} preemptions: decode ran out of KV memory", highlight=False)
    if look.refused:
        console.print(f"{look.refused} requests are longer than an instance's KV memory", highlight=False)


def _spark(values: tuple[int, ...]) -> str:
    top = max(values, default=0) or 1
    return "".join(_BLOCKS[-(-v * (len(_BLOCKS) - 1) // top)] for v in values)
