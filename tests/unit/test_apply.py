"""Applying a placement: which instances change, in which order, and that a failure leaves nothing behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distserve.core.config import Role
from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError
from distserve.serving.orchestrator_config import OrchestratorConfig
from distserve_planner.folder_lock import LockedError, exclusive
from distserve_planner.machine_facts import MachineFacts
from distserve_planner.placement_check import check_placement
from distserve_planner.placement_file import InstancePlan, NodePlan, Placement, parse_placement
from distserve_planner.render import LAUNCH_FILE, render
from distserve_planner.repository_files import write_repository
from distserve_tools.apply.apply import Applier, ApplyError, Timeouts
from distserve_tools.apply.command import with_memory_of
from distserve_tools.apply.instances import Placed, change_to, named, placed_engines
from distserve_tools.apply.order import ordered, serves_both
from distserve_tools.apply.server import ServerError

Given = tuple[Role, tuple[str, ...]]


def placement(*instances: Given, **top: Any) -> Placement:
    plans = tuple(InstancePlan(role, devices, tp=len(devices)) for role, devices in instances)
    return Placement("placement/1", "some/folder", plans, **top)


def engines(of: Placement) -> dict[str, Placed]:
    return dict(zip(of.names, placed_engines(of), strict=True))


BEFORE = placement(("prefill", ("cpu:0",)), ("prefill", ("cpu:1",)), ("decode", ("cpu:2",)))
TURNED = placement(("prefill", ("cpu:0",)), ("decode", ("cpu:1",)), ("decode", ("cpu:2",)))


def test_what_stays_keeps_its_name_and_what_comes_gets_a_free_one() -> None:
    change = change_to(engines(BEFORE), TURNED)
    # the decode instance on cpu:2 is called decode_0 now, though the new placement calls it decode_1
    assert list(change.wanted) == ["prefill_0", "decode_1", "decode_0"]
    assert change.add == ("decode_1",)
    assert change.remove == ("prefill_1",)
    assert change.keep == {"prefill_0", "decode_0"}
    final = named(TURNED, tuple(change.wanted))
    assert final.names == tuple(change.wanted)
    again = change_to(dict(change.wanted), final)
    assert (again.add, again.remove) == ((), ())


def test_an_instance_of_another_shape_is_another_model() -> None:
    wide = placement(("prefill", ("cpu:0",)), ("decode", ("cpu:1", "cpu:2")))
    change = change_to(engines(BEFORE), wide)
    assert change.add == ("decode_1",)
    assert change.remove == ("prefill_1", "decode_0")
    assert [str(step) for step in ordered(change)] == [
        "remove prefill_1",
        "add decode_1 (beside decode_0 on the same devices)",
        "remove decode_0",
    ]


def test_another_model_needs_a_restart() -> None:
    with pytest.raises(ConfigError, match="block_size=32"):
        change_to(engines(BEFORE), replace(TURNED, block_size=32))


DEVICES = [f"cpu:{i}" for i in range(4)]
ROLES: list[Role] = ["prefill", "decode", "unified"]
INSTANCE = st.tuples(
    st.sampled_from(ROLES),
    st.lists(st.sampled_from(DEVICES), min_size=1, max_size=2, unique=True).map(lambda d: tuple(d)),
)
PLACEMENTS = st.lists(INSTANCE, min_size=1, max_size=5).map(lambda items: placement(*items))


def test_where_devices_are_shared_the_new_one_comes_first() -> None:
    """Prefill drains only as fast as decode takes over, and decode may be what is short."""
    steps = [str(step) for step in ordered(change_to(engines(BEFORE), TURNED), share=True)]
    assert steps == ["add decode_1 (beside prefill_1 on the same devices)", "remove prefill_1"]
    apart = [str(step) for step in ordered(change_to(engines(BEFORE), TURNED))]
    assert apart == ["remove prefill_1", "add decode_1"]


@given(PLACEMENTS, PLACEMENTS, st.booleans())
@settings(deadline=None, max_examples=100)
def test_both_phases_are_served_at_every_step(before: Placement, after: Placement, share: bool) -> None:
    now = engines(before)
    change = change_to(now, after)
    steps = ordered(change, share)
    for step in steps:
        if step.action == "add":
            assert step.name not in now
            now[step.name] = change.wanted[step.name]
        else:
            del now[step.name]
        if serves_both(engines(before)) and serves_both(engines(after)):
            assert serves_both(now)
    assert now == dict(change.wanted)
    assert nameless(now) == nameless(engines(after))


def nameless(instances: Mapping[str, Placed]) -> list[str]:
    return sorted(str((replace(e.config, instance=""), e.node)) for e in instances.values())


class FakeServer:
    """A server that reads its models from the repository; `fails` names one call that is refused."""

    def __init__(self, repository: Path, start: Placement) -> None:
        self.repository = repository
        self.start = start
        self.loaded = engines(start)
        self.takes = dict.fromkeys(start.names, True)
        self.fails: tuple[str, str] | None = None
        self.calls: list[tuple[str, str]] = []
        self.new: Mapping[str, Placed] = {}

    def _call(self, what: str, name: str) -> None:
        self.calls.append((what, name))
        if self.fails == (what, name):
            raise ServerError(f"{what} {name} is refused")
        roles = {n: e for n, e in self.loaded.items() if self.takes.get(n)}
        assert serves_both(roles), f"before {what} {name}: a phase is not served"

    def engines(self) -> dict[str, Placed]:
        return dict(self.loaded)

    def orchestrator(self) -> OrchestratorConfig:
        return self.start.orchestrator_config()

    def attached(self) -> dict[str, bool]:
        return dict(self.takes)

    def load(self, engine: Placed, timeout_s: float) -> None:
        name = engine.config.instance
        self._call("load", name)
        assert (self._folder(engine) / name / "config.pbtxt").exists()
        self.loaded[name] = self.new[name]

    def unload(self, engine: Placed, timeout_s: float) -> None:
        name = engine.config.instance
        self._call("unload", name)
        assert name not in self.takes, "still attached"
        assert self.loaded.pop(name).node == engine.node

    def attach(self, engine: Placed, timeout_s: float) -> None:
        name = engine.config.instance
        self._call("attach", name)
        assert self.loaded[name] == engine
        self.takes[name] = True

    def _folder(self, engine: Placed) -> Path:
        """That the engine's server reads its models from."""
        several = len(self.start.nodes) > 1
        return self.repository / engine.node.name if several else self.repository

    def drain(self, name: str, timeout_s: float) -> None:
        self._call("drain", name)
        self.takes[name] = False

    def detach(self, name: str) -> None:
        self._call("detach", name)
        assert not self.takes[name]
        del self.takes[name]


def rendered(of: Placement) -> dict[str, str]:
    return {path: text for path, text in render(of).items() if path != LAUNCH_FILE}


def files(repository: Path) -> dict[str, str]:
    return {
        str(p.relative_to(repository)): p.read_text()
        for p in sorted(repository.rglob("*"))
        if p.is_file() and p.name in ("config.pbtxt", "model.py")
    }


UNIFIED = placement(*(("unified", (f"cpu:{i}",)) for i in range(3)))
NODES = (NodePlan("a", "10.0.0.1", 8001), NodePlan("b", "10.0.0.2", 8001))


def on_nodes(of: Placement, *names: str) -> Placement:
    """The same instances, spread over two hosts."""
    instances = tuple(replace(i, node=name) for i, name in zip(of.instances, names, strict=True))
    return replace(of, instances=instances, nodes=NODES, transfer_secret_file="/etc/secret")


ON_NODES = on_nodes(BEFORE, "a", "b", "b")
CHANGES = [
    (BEFORE, TURNED),
    (BEFORE, UNIFIED),
    (ON_NODES, on_nodes(TURNED, "a", "b", "b")),
    (ON_NODES, on_nodes(BEFORE, "b", "a", "a")),  # the same instances, each on the other host
]


def served(tmp_path: Path, wanted: Placement, before: Placement = BEFORE) -> tuple[FakeServer, Applier]:
    write_repository(tmp_path / "repository", render(before))
    server = FakeServer(tmp_path / "repository", before)
    server.new = {**engines(before), **change_to(engines(before), wanted).wanted}
    return server, Applier(server, tmp_path / "repository", wanted, Timeouts(), lambda line: None)


def test_devices_of_two_hosts_are_not_the_same() -> None:
    """cpu:1 of one host is free for a new instance there, whatever is on cpu:1 of the other."""
    before = on_nodes(BEFORE, "a", "b", "b")
    wanted = on_nodes(
        placement(("prefill", ("cpu:0",)), ("decode", ("cpu:1",)), ("decode", ("cpu:2",))), "a", "a", "b"
    )
    assert [str(step) for step in ordered(change_to(engines(before), wanted))] == [
        "add decode_1", "remove prefill_1",
    ]  # fmt: skip


def test_instances_over_several_nodes_are_left_to_a_restart(tmp_path: Path) -> None:
    wide = InstancePlan("decode", ("cpu:1", "cpu:1"), nodes=("a", "b"), pp=2)
    wanted = replace(ON_NODES, instances=(*ON_NODES.instances[:2], wide))
    with pytest.raises(ConfigError, match="decode_0: over several nodes"):
        served(tmp_path, wanted, ON_NODES)


@pytest.mark.parametrize(("before", "wanted"), CHANGES)
def test_files_and_models_end_as_the_placement(tmp_path: Path, before: Placement, wanted: Placement) -> None:
    server, applier = served(tmp_path, wanted, before)
    final = applier.run()
    assert set(server.loaded) == set(server.takes) == set(final.names)
    assert all(server.takes.values())
    assert files(tmp_path / "repository") == rendered(final)
    count = len(server.calls)
    assert applier.run() == final
    assert len(server.calls) == count  # nothing is done twice


@pytest.mark.parametrize(("before", "wanted"), CHANGES)
def test_a_failure_at_any_call_is_rolled_back(tmp_path: Path, before: Placement, wanted: Placement) -> None:
    server, applier = served(tmp_path / "dry", wanted, before)
    applier.run()
    for number, call in enumerate(dict.fromkeys(server.calls)):
        folder = tmp_path / str(number)
        server, applier = served(folder, wanted, before)
        server.fails = call
        refuse = server._call

        def once(what: str, name: str, server: FakeServer = server, refuse: Any = refuse) -> None:
            try:
                refuse(what, name)
            except ServerError:
                server.fails = None  # what is done to go back succeeds
                raise

        server._call = once  # type: ignore[method-assign]
        with pytest.raises(ApplyError, match="everything is as it was before") as caught:
            applier.run()
        assert caught.value.rolled_back
        assert server.loaded == engines(before)
        assert server.takes == dict.fromkeys(before.names, True)
        assert files(folder / "repository") == rendered(before)


def test_a_rollback_that_fails_too_says_so(tmp_path: Path) -> None:
    server, applier = served(tmp_path, TURNED)
    server.fails = ("load", "decode_1")
    original = server.attach

    def attach(engine: Placed, timeout_s: float) -> None:
        if engine.config.instance == "prefill_1":
            raise ServerError("attach prefill_1 is refused")
        original(engine, timeout_s)

    server.attach = attach  # type: ignore[method-assign]
    with pytest.raises(ApplyError, match="rolling back failed: bring prefill_1 back") as caught:
        applier.run()
    assert not caught.value.rolled_back


def test_what_a_change_that_was_cut_short_left_is_mended(tmp_path: Path) -> None:
    """Attached but not loaded, loaded but draining, and files of what never came."""
    server, applier = served(tmp_path, TURNED)
    server.takes |= {"prefill_9": False, "decode_0": False, "prefill_0": True}
    server.takes["prefill_1"] = True
    server._call = lambda what, name: server.calls.append((what, name))  # type: ignore[method-assign]
    write_repository(
        tmp_path / "repository", render(placement(("unified", ("cpu:0",)), ("unified", ("cpu:0",))))
    )
    final = applier.run()
    assert set(server.takes) == set(final.names) == {"prefill_0", "decode_0", "decode_1"}
    assert all(server.takes.values())
    assert files(tmp_path / "repository") == rendered(final)


def test_settings_that_need_a_restart_are_refused_before_anything_changes(tmp_path: Path) -> None:
    for wanted, message in (
        (replace(TURNED, orchestrator={"heartbeat_s": 0.5}), "orchestrator.heartbeat_s=0.5"),
        (placement(("prefill", ("cpu:0",))), "nobody would serve"),
    ):
        server, applier = served(tmp_path, wanted)
        with pytest.raises(ConfigError, match=message):
            applier.run()
        assert server.calls == []


def test_two_cannot_change_one_repository(tmp_path: Path) -> None:
    with (
        exclusive(tmp_path, "changed"),
        pytest.raises(LockedError, match="is being changed by process"),
        exclusive(tmp_path, "changed"),
    ):
        pass
    with exclusive(tmp_path, "changed"):  # free again
        pass
    with pytest.raises(ConfigError, match="no such folder"), exclusive(tmp_path / "nothing", "changed"):
        pass


def test_what_live_instances_hold_is_not_missing() -> None:
    """Three instances fill a machine; the placement that keeps two of them fits where they are."""
    model = ModelConfig(
        arch="llama", model_type="llama", hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2,
        head_dim=16, ffn_size=128, vocab_size=1000, max_context=2048,
    )  # fmt: skip
    limits = {"kv_bytes": 1 << 30}
    instances = tuple(replace(i, limits=limits) for i in BEFORE.instances)
    before = replace(BEFORE, instances=instances)
    file = parse_placement(before.dump())
    free = MachineFacts(frozenset(range(4)), 1 << 20, ())
    with pytest.raises(ConfigError, match="for weights and KV caches"):
        check_placement(file, model, free)
    check_placement(file, model, with_memory_of(free, engines(before), before, model))
