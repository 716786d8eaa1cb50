"""Who goes where: the rules, and that the orchestrator and the simulator follow them."""

from __future__ import annotations

import pytest

from distserve.core.dispatch import (
    Binding,
    DecodeLoad,
    PromptLoad,
    bind_in_order,
    choose_decode,
    choose_prefill,
)
from distserve.core.order import Ordering
from distserve.core.scheduler import Limits
from distserve_planner.cluster import Link
from distserve_planner.coefficients import DecodePiece, Degree, PrefillPiece
from distserve_planner.latency import LatencyModel
from distserve_planner.models_catalog import model_dimensions
from distserve_planner.simulator.spec import InstanceSpec, SystemSpec
from distserve_planner.simulator.system import Simulation
from orchestrator_bench import Bench, scenario

LM = 512


def load(waiting: int = 0, requests: int = 0, credits: int = 2 * LM, **more: int | bool) -> PromptLoad:
    return PromptLoad(waiting, requests, credits, LM, waiting == 0, **more)  # type: ignore[arg-type]


def test_least_work_then_fewest_requests() -> None:
    assert choose_prefill(10, [load(300, 1), load(200, 9), load(250, 0)]) == 1
    assert choose_prefill(10, [load(0, 5), load(0, 2), load(0, 2)]) == 1
    assert choose_prefill(10, []) is None


def test_a_prompt_goes_where_it_can_start_within_two_batches() -> None:
    assert choose_prefill(300, [load(100, credits=200), load(900, credits=400)]) == 1
    assert choose_prefill(500, [load(100, credits=200), load(900, credits=400)]) is None


def test_a_long_prompt_goes_where_nothing_waits() -> None:
    computing = load(LM, 1)  # a batch is being computed, its queue is empty
    assert choose_prefill(5 * LM, [computing]) == 0
    assert choose_prefill(5 * LM, [load(LM + 20, 2, credits=2 * LM - 20)]) is None
    assert choose_prefill(5 * LM, [load(0, 0, credits=100)]) == 0  # all it has is for this one
    assert choose_prefill(5 * LM, [load(0, 0, credits=0)]) is None


def test_one_prompt_in_pieces_at_a_time() -> None:
    assert choose_prefill(5 * LM, [load(LM, 1, credits=20, longs=0, pieces_above=LM)]) == 0
    assert choose_prefill(5 * LM, [load(LM, 1, longs=1, pieces_above=LM)]) is None
    assert choose_prefill(LM, [load(LM, 1, longs=1, pieces_above=LM)]) == 0


def test_decode_goes_to_the_emptiest_for_its_size() -> None:
    assert choose_decode([DecodeLoad(10, 16), DecodeLoad(20, 64), DecodeLoad(5, 8)]) == 1
    assert choose_decode([]) is None


def test_queue_keeps_its_order_but_for_prompts_in_nobodys_way() -> None:
    queue = ["unservable", "a", "long 1", "long 2", "b", "full", "c"]
    bound = []

    def bind(item: str, stuck: bool) -> Binding:
        if item.startswith("long"):
            assert stuck == (item == "long 2")
            return Binding.LONG
        if item in ("unservable", "full"):
            return Binding.PASSED if item == "unservable" else Binding.BLOCKS
        bound.append(item)
        return Binding.BOUND

    bind_in_order(queue, bind)
    assert bound == ["a", "b"]
    assert queue == ["unservable", "long 1", "long 2", "full", "c"]


# in the simulator


def instance(
    prefill: PrefillPiece, pp: int = 1, limits: Limits | None = None, order: Ordering | None = None
) -> InstanceSpec:
    degree = Degree(1, (prefill,), (DecodePiece(0.02, 0.0),))
    model = LatencyModel("opt-125m", model_dimensions("opt-125m"), "test", "fp16", (degree,))
    latency = model.instance(1, pp, stage_link=Link(1e15))
    return InstanceSpec(latency, 10_000, limits or Limits(64, LM), ordering=order or Ordering())


def test_long_prompts_follow_each_other_through_a_pipeline() -> None:
    spec = instance(PrefillPiece(0.2, 0.0), pp=2)  # 0.1 s a stage
    run = Simulation(SystemSpec(prefill=(spec, spec)), [0.0] * 8, [3 * LM] * 8, [1] * 8)
    run.run()
    # four each: the first leaves after two stages, the others one stage behind each other
    assert run.outcome().first.max() == pytest.approx(0.1 * (2 + 3), rel=1e-3)


def test_colocated_instances_are_chosen_by_prompts_that_wait_not_by_requests() -> None:
    spec = instance(PrefillPiece(0.0, 1e-3))
    run = Simulation(SystemSpec(unified=(spec, spec)), [0.0, 0.01, 0.02], [500, 50, 60], [200, 200, 2])
    run.run()
    # the first instance computes 500 tokens until 0.5 s; the other has two requests and less to do
    assert [unit.index for unit in run.unified if unit.busy_s > 0] == [0, 1]
    assert run.outcome().first == pytest.approx([0.5, 0.06, 0.12], abs=0.021)


@pytest.mark.parametrize("form", ["one", "two", "unified"])
def test_shortest_first_lets_a_short_prompt_pass(form: str) -> None:
    order = Ordering("shortest", 1000.0)
    spec = instance(PrefillPiece(0.0, 1e-3), order=order)
    systems = {
        "one": SystemSpec(prefill=(spec,), ordering=order),
        "two": SystemSpec(prefill=(spec, spec), ordering=order),
        "unified": SystemSpec(unified=(spec,), ordering=order),
    }
    copies = 2 if form == "two" else 1  # of each prompt but the last
    prompts = [n for n in (500, 400, 450, 480) for _ in range(copies)]
    arrivals = [t for t in (0.0, 0.01, 0.02, 0.03) for _ in range(copies)]
    run = Simulation(systems[form], [*arrivals, 0.04], [*prompts, 200], [1] * (4 * copies + 1))
    run.run()
    first = run.outcome().first
    assert first[-1] < first[3 * copies]  # came last, goes before the 480 tokens


def test_ageing_lets_a_long_prompt_pass_newer_short_ones() -> None:
    order = Ordering("shortest", 1000.0)
    spec = instance(PrefillPiece(0.0, 1e-3), limits=Limits(64, 60), order=order)
    arrivals = [0.0, 0.001, *(0.05 * i for i in range(1, 40))]
    run = Simulation(SystemSpec(prefill=(spec,), ordering=order), arrivals, [500, 400, *[50] * 39], [1] * 41)
    run.run()
    first = run.outcome().first
    assert first[1] == pytest.approx(0.5 + 0.4 + 7 * 0.05, abs=0.06)  # those of 50 that came within 0.35 s


def test_short_prompts_pass_between_the_pieces_of_a_long_one() -> None:
    whole = instance(PrefillPiece(0.0, 1e-3))
    pieces = instance(PrefillPiece(0.0, 1e-3), limits=Limits(64, LM, prefill_chunk_tokens=250))
    firsts = []
    for spec in (whole, pieces):
        for count in (1, 2):
            prompts = [2000] * count + [100]
            run = Simulation(
                SystemSpec(prefill=(spec,) * count), [*[0.0] * count, 0.1], prompts, [1] * (count + 1)
            )
            run.run()
            firsts.append(run.outcome().first[-1])
    assert firsts == pytest.approx([2.1, 2.1, 0.35, 0.35])


# in the orchestrator


@scenario(
    roles=("prefill", "prefill", "decode", "decode"),
    groups={"prefill_0": "a", "decode_1": "a", "prefill_1": "b", "decode_0": "b"},
)
async def test_prefill_hands_over_within_its_group(bench: Bench) -> None:
    sinks = [await bench.request([n, 1, 2], 6) for n in range(30)]
    for sink in sinks:
        await sink.end()
    pairs = {
        (sink.final.stage_times["prefill_instance"], sink.final.stage_times["decode_instance"])
        for sink in sinks
    }
    assert pairs == {("prefill_0", "decode_1"), ("prefill_1", "decode_0")}
    bench.engine("decode_1").kill()  # nobody of the group is left: any other will do
    await bench.until(lambda: not bench.orchestrator.fleet.links["decode_1"].up)
    sinks = [await bench.request([n, 3], 4) for n in range(8)]
    for sink in sinks:
        await sink.end()
    assert {sink.final.stage_times["decode_instance"] for sink in sinks} == {"decode_0"}


@scenario(roles=("prefill", "decode"), engines={"prefill_0": {"credits": 64, "prefill_s": 0.02}})
async def test_link_tells_the_loads_that_decide(bench: Bench) -> None:
    prefill = bench.engine("prefill_0")
    link = bench.orchestrator.fleet.links["prefill_0"]
    await bench.until(lambda: link.up)
    assert link.prompt_load() == PromptLoad(0, 0, 64, 32, True)
    prefill.paused = True
    sinks = [await bench.request([1] * 20, 2), await bench.request([1] * 30, 2)]
    assert link.prompt_load() == PromptLoad(50, 2, 14, 32, False)
    prefill.paused = False
    for sink in sinks:
        await sink.end()
    await bench.settled()
    assert link.prompt_load() == PromptLoad(0, 0, 64, 32, True)
