"""`distserve testbed`: disaggregated against colocated serving on two cores, measured and predicted."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from distserve.core.model_config import cache_folder, resolve_model
from distserve.core.parsing import ConfigError
from distserve_planner.profile_file import Profile
from distserve_tools.console import StepLines
from distserve_tools.demo_model import ensure_demo_model
from distserve_tools.engine_peers.random_llama import random_llama
from distserve_tools.serve import START_ERRORS, signals_interrupt
from distserve_tools.testbed.bench_transfer import measured_transfers, transfers_text
from distserve_tools.testbed.campaign import (
    Campaign,
    begin_campaign,
    belongs,
    fitting,
    measure,
    missing_turns,
    sizing,
)
from distserve_tools.testbed.comparison import allowed_points, pairs
from distserve_tools.testbed.plan import RANDOM_MODEL, WORKLOADS, ScaledWorkload, TestbedPlan
from distserve_tools.testbed.profiling import profile_on_a_core
from distserve_tools.testbed.recorded import Recording, read_campaigns
from distserve_tools.testbed.report import report
from distserve_tools.testbed.simulated import simulated_goodputs
from distserve_tools.testbed.summary import summary
from distserve_tools.testbed.systems import SYSTEMS, EngineLimits, Served, cores, serving
from distserve_tools.testbed.vllm_peer import VLLM, vllm_serving

FOLDER, RESULTS = Path("build/testbed"), "results.json"
SHORTEST_BATCH = 64  # tokens; a smaller Lm would make batches of prompts pointless

EXAMPLES = """\
examples:
  distserve testbed --quick                      minutes: one model, one workload, nothing is judged
  distserve testbed --quick --workload code      another one
  distserve testbed --quick --model random-llama --workload summarization --run-s 60
  distserve testbed                              hours: both models, three workloads, vLLM beside
  distserve testbed --resume                     goes on where that broke off
  distserve testbed --simulate --profile cpu.yaml        no server: what the planner expects
  distserve testbed --quick --profile cpu.yaml   with step times that `distserve profile` wrote
  distserve testbed --again build/testbed/results.json   what was measured there, simulated and reported again
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `distserve testbed`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("--quick", action="store_true", help="short runs of one workload")
    parser.add_argument(
        "--workload",
        action="append",
        choices=[w.label for w in WORKLOADS],
        help="measure this one; may be repeated (all of them; with --quick: chat)",
    )
    parser.add_argument(
        "--model",
        choices=TestbedPlan.models,
        help="measure this one (both of them; with --quick: the first)",
    )
    parser.add_argument("--output", type=Path, help=f"folder ({FOLDER}; with --again: that of RESULTS)")
    parser.add_argument("--profile", type=Path, help="step times of the (first) model, instead of measuring")
    parser.add_argument("--run-s", type=float, help="seconds of load per run")
    parser.add_argument(
        "--top-rate", type=float, help="requests/s to measure around, instead of the simulation's limit"
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="no server: simulated goodput with the step times of --profile",
    )
    parser.add_argument(
        "--again",
        type=Path,
        metavar="RESULTS",
        help="no server: simulate and report what a results.json holds; a run that broke off leaves one, too",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="measure only what the folder's results.json does not hold yet",
    )
    parser.add_argument("--vllm", action="store_true", help="two vLLM servers beside ours, also with --quick")
    parser.add_argument("--no-vllm", action="store_true", help="leave them out of the full run")


def run(args: argparse.Namespace) -> int:
    """Returns 0 when everything was measured and, in the full run, predicted within the noise."""
    plan = TestbedPlan.quick() if args.quick else TestbedPlan()
    if args.run_s is not None:
        plan = plan.lasting(args.run_s)
    if args.workload:
        plan = replace(plan, workloads=tuple(w for w in WORKLOADS if w.label in args.workload))
    if args.model:
        plan = replace(plan, models=(args.model,))
    if args.again:
        return _again(args.again, args.output or args.again.parent)
    if args.simulate:
        return _simulate(args, plan.workloads if args.workload else WORKLOADS)
    lines = StepLines()
    cores()
    folder = args.output or FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with_vllm = args.vllm or not (args.quick or args.no_vllm)
    results = folder / RESULTS
    systems = len(SYSTEMS) + with_vllm
    recording = Recording(results, read_campaigns(results) if args.resume and results.exists() else ())
    minutes = plan.load_s(systems) / 60
    beside = f"{minutes:.0f} minutes of load, and about as much beside"
    lines.say(f"{len(plan.models)} models x {len(plan.workloads)} workloads: {beside}")
    lines.say(f"runs are kept in {results}; should this break off: again with --resume, or --again {results}")
    try:
        with signals_interrupt():
            for name in plan.models:
                _measure(plan, name, args, folder, with_vllm, recording, lines.say)
    except START_ERRORS as error:
        sys.stderr.write(f"distserve testbed: {error}\n")
        return 1
    except KeyboardInterrupt:
        lines.say("interrupted: reporting the rates that were measured")
        _write(recording, "", folder, lines.say)
        return 130
    transfers = transfers_text(*measured_transfers(_model(plan.models[0], lines.say), lines.say))
    campaigns = _write(recording, "## KV transfer\n\n" + transfers, folder, lines.say)
    return 0 if not plan.judge or all(_within_noise(c, lines.say) for c in campaigns) else 3


def _again(results: Path, folder: Path) -> int:
    recording = Recording(results, read_campaigns(results))
    folder.mkdir(parents=True, exist_ok=True)
    _write(recording, "", folder, StepLines().say)
    return 0


def _simulate(args: argparse.Namespace, workloads: Sequence[ScaledWorkload]) -> int:
    if args.profile is None:
        raise ConfigError("--simulate: needs --profile FILE, which `distserve profile` writes")
    profile = Profile.load(args.profile)
    limits = EngineLimits(_batch_tokens(profile), 256)
    fitted = [fitting(profile, workload, limits) for workload in workloads]
    sys.stdout.write(simulated_goodputs(profile, fitted, limits) + "\n")
    return 0


def _model(name: str, say: Callable[[str], None]) -> str:
    """What a placement calls one of `TestbedPlan.models`, which is made if it is not there."""
    if name == RANDOM_MODEL:
        return str(random_llama(cache_folder() / "models" / "bench-llama-125m"))
    ensure_demo_model(say)
    return name


def _batch_tokens(profile: Profile) -> int:
    return max(SHORTEST_BATCH, profile.latency_model().lm_tokens_for(1))


def _measure(
    plan: TestbedPlan,
    name: str,
    args: argparse.Namespace,
    folder: Path,
    with_vllm: bool,
    recording: Recording,
    say: Callable[[str], None],
) -> None:
    """All workloads with one model, as far as they are not recorded yet; profiled once.

    Raises `ConfigError` for one that is recorded as another plan has it.
    """
    labels = {workload.label for workload in plan.workloads}
    found = [c for c in recording if c.model == name and c.workload.label in labels]
    for other in found:
        if not belongs(other, plan, len(SYSTEMS) + with_vllm):
            raise ConfigError(
                f"--resume: {folder / RESULTS} holds {other.workload.label} of {name} as another plan has it "
                "(--run-s, --quick or the systems differ); give those options, or another --output"
            )
    begun = {c.workload.label: c for c in found}
    missing = [w for w in plan.workloads if w.label not in begun or missing_turns(begun[w.label], plan)]
    for label in begun.keys() - {w.label for w in missing}:
        say(f"{name}, {label}: measured already")
    if not missing:
        return
    model = _model(name, say)
    given = args.profile if name == plan.models[0] else None
    measured = folder / f"profile-{_slug(name)}.yaml"
    if given is None and found:
        profile = found[0].profile
    else:
        profile = Profile.load(given or profile_on_a_core(model, measured, say, plan.quick_profile))
    for workload in missing:
        campaign = begun.get(workload.label)
        if campaign:
            workload, limits, top = campaign.workload, campaign.limits, 0.0
        else:
            workload, limits, top = _sizing(profile, workload, args.top_rate, say)
        with _all_systems(model, limits, with_vllm, say) as served:
            if campaign is None:
                campaign = begin_campaign(plan, name, workload, profile, limits, top, served, say)
            measure(plan, campaign, served, say, recording.keep)


def _sizing(
    profile: Profile, workload: ScaledWorkload, top_rate: float | None, say: Callable[[str], None]
) -> tuple[ScaledWorkload, EngineLimits, float]:
    """The workload as this core can serve it, the engines' limits, and the rate to measure around."""
    limits = EngineLimits(_batch_tokens(profile), 256)
    workload = fitting(profile, workload, limits)
    limits, simulated_top = sizing(profile, workload, limits)
    say(
        f"{workload.label}: {workload.name} x {workload.scale:g}, chunk {limits.chunk_tokens}, "
        f"Lm {limits.max_batch_tokens}, overrun at {simulated_top:.2f}/s"
    )
    return workload, limits, top_rate or simulated_top


@contextlib.contextmanager
def _all_systems(
    model: str, limits: EngineLimits, with_vllm: bool, say: Callable[[str], None]
) -> Iterator[Mapping[str, Served]]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="distserve-testbed-")))
        served = dict(stack.enter_context(serving(SYSTEMS, model, limits, folder, say)))
        if with_vllm:
            say(f"starting {VLLM}")
            served[VLLM] = stack.enter_context(vllm_serving(resolve_model(model), limits, folder, say))
        yield served


def _write(recording: Recording, transfer: str, folder: Path, say: Callable[[str], None]) -> list[Campaign]:
    """The report and its figures; returns the campaigns in it."""
    from distserve_tools.testbed.figures import draw

    campaigns = recording.finished()
    texts, figures = [summary(campaigns)], []
    for campaign in campaigns:
        texts.append(report(campaign))
        prefix = f"{_slug(campaign.model)}-{campaign.workload.label}"
        figures += draw(campaign, folder / "figures", prefix)
    texts.append(transfer)
    recording.save(folder / RESULTS)
    (folder / "report.md").write_text("\n".join(texts))
    sys.stdout.write("\n".join(texts))
    say(f"wrote {folder / 'report.md'}, {RESULTS} and {len(figures)} figures")
    return campaigns


def _within_noise(campaign: Campaign, say: Callable[[str], None]) -> bool:
    """Every prediction within 2 points, or twice the noise of repeats, where that is larger."""
    fine = True
    for label, slo in campaign.slos.items():
        allowed = allowed_points(campaign.runs, campaign.systems, slo)
        for name in campaign.terms:
            for pair in pairs(campaign.runs, name, slo):
                if pair.error is not None and abs(pair.error) > allowed:
                    say(
                        f"{campaign.workload.label}, {label}: {name} at {pair.rate_rps:g}/s is predicted "
                        f"{pair.error:+.1f} points off, allowed are {allowed:.1f}"
                    )
                    fine = False
    return fine


def _slug(model: str) -> str:
    return model.removeprefix("cache:").replace("/", "-")
