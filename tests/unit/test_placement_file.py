"""Placement files: what is read, and that a refusal names line, field, value and fix."""

from __future__ import annotations

import dataclasses

import pytest

from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig, RopeConfig
from distserve.core.parsing import ConfigError
from distserve_planner.device_names import parse_device
from distserve_planner.machine_facts import MachineFacts
from distserve_planner.placement_check import check_placement
from distserve_planner.placement_file import (
    LIMITS,
    Placement,
    default_placement,
    parse_placement,
)

GOOD = """\
schema: placement/1
model: cache:some-model
instances:
  - role: prefill
    devices: [cpu:0]
    kv_bytes: 1048576
  - role: decode
    devices: [cpu:1]
    num_blocks: 64
"""
MODEL = ModelConfig(
    arch="llama",
    model_type="llama",
    hidden_size=64,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=128,
    vocab_size=1000,
    max_context=512,
    rope=RopeConfig(),
)
MACHINE = MachineFacts(frozenset({0, 1}), memory_available_bytes=1 << 30, gpu_memory_bytes=())


def problems(text: str, model: ModelConfig | None = MODEL, machine: MachineFacts | None = MACHINE) -> str:
    with pytest.raises(ConfigError) as caught:
        check_placement(parse_placement(text, "p.yaml"), model, machine)
    return str(caught.value)


def changed(old: str, new: str, text: str = GOOD) -> str:
    assert old in text
    return text.replace(old, new)


def test_good_placement_passes_every_check() -> None:
    file = parse_placement(GOOD)
    check_placement(file, MODEL, MACHINE)
    assert file.placement.names == ("prefill_0", "decode_0")
    engine = file.placement.engine_config(1)
    assert (engine.instance, engine.role, engine.num_blocks, engine.devices) == (
        "decode_0",
        "decode",
        64,
        ("cpu:1",),
    )


def test_an_instance_may_set_what_is_not_set_for_all() -> None:
    everything = {f.name for f in dataclasses.fields(EngineConfig)}
    own = {"role", "devices", "tp", "pp"}
    for_all = {"instance", "model", "dtype", "block_size", "transfer_host", "transfer_secret_file"}
    for_all |= {"rank_servers"}
    assert everything == LIMITS | own | for_all
    assert not LIMITS & for_all


def test_default_placement_is_one_prefill_and_one_decode() -> None:
    file = default_placement()
    check_placement(file)
    assert [i.role for i in file.placement.instances] == ["prefill", "decode"]
    assert file.placement.model.startswith("cache:")


def test_dump_reads_back_the_same() -> None:
    text = changed("instances:", "oversubscribe: true\nnodes: [{name: a, devices: [cpu:0-1]}]\ninstances:")
    placement = parse_placement(text).placement
    assert parse_placement(placement.dump()).placement == placement
    assert isinstance(placement, Placement)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("kv_bytes", "kv_byte", "p.yaml:6: instances[0]: unknown key 'kv_byte'; did you mean 'kv_bytes'?"),
        ("model:", "modle:", "p.yaml:2: unknown key 'modle'; did you mean 'model'?"),
        ("role: decode", "role: decoder", "p.yaml:7: instances[1].role: 'decoder' is not allowed; one of"),
        (
            "num_blocks: 64",
            "num_blocks: many",
            "p.yaml:9: instances[1].num_blocks: expected int, found",
        ),
        ("num_blocks: 64", "num_blocks: 0", "p.yaml:9: instances[1]: num_blocks=0: must be at least 1"),
        ("placement/1", "placement/7", "p.yaml:1: schema: 'placement/7' is not supported"),
        ("kv_bytes: 1048576", "role: decode", "p.yaml:6: 'role' was given before, on line 4"),
        ("[cpu:1]", "[cpu:1", "p.yaml:9: not YAML"),
        ("[cpu:1]", "[gpu:1]", "p.yaml:8: instances[1].devices[0]: device 'gpu:1': must be cpu:CORE"),
        ("[cpu:1]", "[cpu:0]", "cpu:0 is already used by prefill_0 (line 5)"),
        ("[cpu:1]", "[cpu:0-1]", "cpu:0 is already used by prefill_0 (line 5)"),
        ("[cpu:1]", "[cpu:0]", "set 'oversubscribe: true'"),
        (
            "[cpu:1]",
            "[cpu:7]",
            "p.yaml:8: instances[1].devices[0]: cpu:7: cpu 7 is not there; this machine",
        ),
        ("[cpu:1]", "[cuda:0]", "this machine has 0 GPUs"),
        ("num_blocks: 64", "tp: 2", "p.yaml:8: instances[1]: devices=['cpu:1']: tp=2 x pp=1 needs 2"),
        ("num_blocks: 64", "name: prefill_0", "the name 'prefill_0' is taken by instances[0]"),
        ("num_blocks: 64", "name: orchestrator", "p.yaml:9: instances[1].name: 'orchestrator'"),
        ("num_blocks: 64", "name: ../x", "p.yaml:9: instances[1].name: '../x'"),
        ("num_blocks: 64", "node: far", "p.yaml:9: instances[1].node: 'far': no such node"),
        ("role: decode", "role: prefill", "no instance can decode; add one with 'role: decode'"),
        ("role: prefill", "role: decode", "no instance can prefill"),
        ("num_blocks: 64", "max_context: 513", "p.yaml:9: instances[1].max_context: 513: the model has 512"),
        ("num_blocks: 64", "lease_s: 5", "p.yaml:9: instances[1].lease_s: 5: must be at least three times"),
        (
            "num_blocks: 64",
            "heartbeat_s: 5",
            "p.yaml:9: instances[1].heartbeat_s: 5: must be the orchestrator's",
        ),
        (
            "model:",
            "orchestrator: {lane: 2}\nmodel:",
            "p.yaml:2: orchestrator: unknown key 'lane'; did you mean",
        ),
        ("model:", "orchestrator: {model: x}\nmodel:", "p.yaml:2: orchestrator.model: is the"),
        ("model:", "orchestrator: {lanes: 0}\nmodel:", "p.yaml:2: orchestrator: lanes=0: must be at least 1"),
        ("kv_bytes: 1048576", "kv_bytes: 9876543210", "node node0 has 1.00 GiB"),
        ("kv_bytes: 1048576", "kv_bytes: 9876543210", "prefill_0 9.20 GiB"),
    ],
)
def test_refusals_name_line_field_value_and_fix(old: str, new: str, expected: str) -> None:
    assert expected in problems(changed(old, new))


def test_shapes_that_the_model_cannot_have() -> None:
    text = changed("devices: [cpu:1]\n    num_blocks: 64", "devices: [cpu:0, cpu:0, cpu:0]\n    tp: 3")
    message = problems(changed("instances:", "oversubscribe: true\ninstances:", text))
    assert "p.yaml:10: instances[1].tp: tp=3: with 2 KV heads allowed are 1 to 2 and multiples" in message


def test_all_problems_of_one_stage_are_reported_together() -> None:
    message = problems(changed("[cpu:0]", "[cpu:8]", changed("[cpu:1]", "[cpu:9]")))
    assert "p.yaml:5:" in message
    assert "p.yaml:8:" in message


def test_oversubscribe_allows_a_shared_core() -> None:
    text = changed("instances:", "oversubscribe: true\ninstances:", changed("[cpu:1]", "[cpu:0]"))
    check_placement(parse_placement(text), MODEL, MACHINE)


def test_limits_in_the_file_stand_in_for_the_machine() -> None:
    node = "nodes: [{name: big, host: 10.0.0.1, devices: [cuda:0, cuda:1], device_memory_bytes: 1000000}]\n"
    text = changed("instances:", node + "instances:")
    text = changed("[cpu:0]", "[cuda:0]", changed("[cpu:1]", "[cuda:3]", text))
    assert "cuda 3 is not there; node big lists cuda:0, cuda:1" in problems(text)
    assert "cuda:0 of node big has 0.00 GiB" in problems(changed("[cuda:3]", "[cuda:1]", text))


def test_several_hosts_need_a_secret_and_ports() -> None:
    nodes = "nodes:\n  - {name: a, host: 10.0.0.1}\n  - {name: b, host: 10.0.0.2}\n"
    text = changed("num_blocks: 64", "node: b", changed("instances:", nodes + "instances:"))
    message = problems(text)
    assert "transfer_secret_file" in message
    assert "p.yaml:5: nodes[1]: grpc_port is missing" in message


OVER_NODES = """\
schema: placement/1
model: m
transfer_secret_file: /etc/secret
nodes:
  - {name: a, host: 10.0.0.1, devices: [cpu:0-2]}
  - {name: b, host: 10.0.0.2, devices: [cpu:0-2], grpc_port: 8001}
instances:
  - {role: prefill, pp: 2, nodes: [a, b], devices: [cpu:0, cpu:0]}
  - {role: decode, tp: 2, nodes: [b, b], devices: [cpu:1, cpu:2]}
"""


def test_an_instance_over_nodes_has_a_device_of_each() -> None:
    file = parse_placement(OVER_NODES)
    check_placement(file)
    placement = file.placement
    assert parse_placement(placement.dump()).placement == placement
    over, whole = placement.engine_config(0), placement.engine_config(1)
    assert (over.rank_servers, over.transfer_host) == (("", "10.0.0.2:8001"), "10.0.0.1")
    assert over.remote_ranks == {"10.0.0.2:8001": (1,)}
    assert [over.host_of(rank) for rank in range(2)] == ["10.0.0.1", "10.0.0.2"]
    assert (whole.rank_servers, whole.transfer_host, whole.remote_ranks) == (None, "10.0.0.2", {})
    assert [spec.address for spec in placement.orchestrator_config().instances] == [None, "10.0.0.2:8001"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[a, b]", "[a, c]", "p.yaml:8: instances[0].nodes[1]: 'c': no such node"),
        ("[a, b]", "[a]", "p.yaml:8: instances[0].nodes: ['a']: tp=1 x pp=2 needs 2, one per rank"),
        (
            "nodes: [a, b]",
            "node: a, nodes: [a, b]",
            "p.yaml:8: instances[0].nodes: ['a', 'b']: either 'node'",
        ),
        (
            ", grpc_port: 8001",
            "",
            "p.yaml:6: nodes[1]: grpc_port is missing; prefill_0, whose rank 0 is on a",
        ),
        (
            "[cpu:0, cpu:0]",
            "[cpu:0, cpu:1]",
            "p.yaml:9: instances[1].devices[0]: cpu:1: cpu:1 is already used",
        ),
        ("[cpu:0, cpu:0]", "[cpu:0, cpu:3]", "p.yaml:8: instances[0].devices[1]: cpu:3: cpu 3 is not there"),
        ("role: decode", "role: decode, name: prefill_0_ranks", "'prefill_0_ranks': is what hosts ranks of"),
        ("pp: 2", "pp: 2, collectives: memory", "collectives='memory': an instance over several nodes needs"),
    ],
)
def test_refusals_of_instances_over_nodes(old: str, new: str, expected: str) -> None:
    assert expected in problems(changed(old, new, OVER_NODES))


@pytest.mark.parametrize("name", ["cpu", "cpu:", "cpu:-1", "cpu:3-1", "cuda:0-1", "tpu:0", "cpu:0 "])
def test_device_names_that_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        parse_device(name)


def test_device_overlap() -> None:
    assert parse_device("cpu:0-3").overlap(parse_device("cpu:3-5")) == range(3, 4)
    assert not parse_device("cpu:0-3").overlap(parse_device("cpu:4"))
    assert not parse_device("cpu:0").overlap(parse_device("cuda:0"))
