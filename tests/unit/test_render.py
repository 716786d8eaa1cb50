"""What `planner generate` writes, and what it refuses to overwrite."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from distserve.core.config import EngineConfig
from distserve.core.parsing import ConfigError
from distserve.serving.schema import ORCHESTRATOR_INPUTS, STAGE_INPUTS
from distserve_planner.cli import main
from distserve_planner.placement_file import parse_placement
from distserve_planner.render import render
from distserve_planner.repository_files import MANIFEST, write_repository
from distserve_tools.device_check.serving import placement as check_placement
from distserve_tools.device_check.settings import Settings

CPU = """\
schema: placement/1
model: /models/m
instances:
  - {role: prefill, devices: [cpu:0], max_batch_tokens: 128}
  - {role: decode, devices: [cpu:1], num_blocks: 64}
"""


def model_config(text: str) -> Any:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def one_instance(devices: str, more: str = "") -> Any:
    files = render(
        parse_placement(
            "schema: placement/1\nmodel: m\ninstances:\n"
            f"  - {{role: unified, name: one, devices: [{devices}]{more}}}\n"
        ).placement
    )
    return model_config(files["one/config.pbtxt"])


def test_one_model_per_instance_and_the_orchestrator() -> None:
    files = render(parse_placement(CPU).placement)
    assert sorted(files) == [
        f"{model}/{name}"
        for model in ("decode_0", "orchestrator", "prefill_0")
        for name in ("1/model.py", "config.pbtxt")
    ]
    for path, text in files.items():
        if path.endswith("model.py"):
            compile(text, path, "exec")


def test_the_engine_parameter_reads_back() -> None:
    placement = parse_placement(CPU).placement
    files = render(placement)
    for index, name in enumerate(placement.names):
        config = model_config(files[f"{name}/config.pbtxt"])
        engine = EngineConfig.load(json.loads(config.parameters["engine"].string_value))
        assert engine == placement.engine_config(index)
        assert [t.name for t in config.input] == [s.name for s in STAGE_INPUTS]
        assert not config.model_transaction_policy.decoupled


def test_the_orchestrator_knows_its_instances() -> None:
    config = model_config(render(parse_placement(CPU).placement)["orchestrator/config.pbtxt"])
    assert config.model_transaction_policy.decoupled
    assert [(t.name, t.optional) for t in config.input] == [(s.name, s.optional) for s in ORCHESTRATOR_INPUTS]
    settings = json.loads(config.parameters["orchestrator"].string_value)
    assert settings["instances"] == [
        {"name": "prefill_0", "role": "prefill"},
        {"name": "decode_0", "role": "decode"},
    ]


def test_instance_groups() -> None:
    kinds = model_config_pb2.ModelInstanceGroup
    cpu = one_instance("cpu:0").instance_group
    assert [(g.kind, list(g.gpus), g.count) for g in cpu] == [(kinds.KIND_CPU, [], 1)]
    gpu = one_instance("cuda:3").instance_group
    assert [(g.kind, list(g.gpus), g.count) for g in gpu] == [(kinds.KIND_GPU, [3], 1)]
    several = one_instance("cuda:1, cuda:2", ", tp: 2")
    assert [(g.kind, list(g.gpus)) for g in several.instance_group] == [(kinds.KIND_MODEL, [])]
    assert several.parameters["devices"].string_value == "cuda:1,cuda:2"


def test_two_instances_on_one_gpu() -> None:
    """As `distserve device-check` serves them: kinds, GPU ids and what the engines are told."""
    settings = Settings("cuda:5", "bf16", "device", "/tmp")
    placement = parse_placement(check_placement(settings, Path("/m"))).placement
    files = render(placement)
    kinds = model_config_pb2.ModelInstanceGroup
    for name, role, graphs in (("prefill_0", "prefill", None), ("decode_0", "decode", True)):
        config = model_config(files[f"{name}/config.pbtxt"])
        assert config.backend == "python"
        groups = config.instance_group
        assert [(g.kind, list(g.gpus), g.count) for g in groups] == [(kinds.KIND_GPU, [5], 1)]
        engine = EngineConfig.load(json.loads(config.parameters["engine"].string_value))
        assert (engine.role, engine.devices, engine.dtype) == (role, ("cuda:5",), "bf16")
        assert (engine.decode_graphs, engine.kv_bytes) == (graphs, 4 << 30)


def test_one_repository_per_node() -> None:
    text = """\
schema: placement/1
model: m
transfer_secret_file: /etc/secret
nodes:
  - {name: a, host: 10.0.0.1}
  - {name: b, host: 10.0.0.2, grpc_port: 8001}
instances:
  - {role: prefill, node: a, devices: [cuda:0]}
  - {role: decode, node: b, devices: [cuda:0]}
"""
    files = render(parse_placement(text).placement)
    assert {path.rpartition("/")[0] for path in files} == {
        "",
        "a/orchestrator",
        "a/orchestrator/1",
        "a/prefill_0",
        "a/prefill_0/1",
        "b/decode_0",
        "b/decode_0/1",
    }
    settings = model_config(files["a/orchestrator/config.pbtxt"]).parameters["orchestrator"].string_value
    assert json.loads(settings)["instances"][1]["address"] == "10.0.0.2:8001"
    engine = json.loads(model_config(files["b/decode_0/config.pbtxt"]).parameters["engine"].string_value)
    assert (engine["transfer_host"], engine["transfer_secret_file"]) == ("10.0.0.2", "/etc/secret")


def test_writing_twice_changes_nothing(tmp_path: Path) -> None:
    files = render(parse_placement(CPU).placement)
    assert write_repository(tmp_path / "repo", files)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.rglob("*") if p.is_file()}
    assert write_repository(tmp_path / "repo", files) == []
    assert before == {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.rglob("*") if p.is_file()}


def test_stale_models_go_and_foreign_files_stay(tmp_path: Path) -> None:
    write_repository(tmp_path, {"a/config.pbtxt": "a", "b/config.pbtxt": "b", "b/1/model.py": ""})
    (tmp_path / "b/notes.txt").write_text("mine")
    write_repository(tmp_path, {"a/config.pbtxt": "a2"})
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == [
        MANIFEST,
        "a/config.pbtxt",
        "b/notes.txt",
    ]
    assert (tmp_path / "a/config.pbtxt").read_text() == "a2"


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    with pytest.raises(ConfigError, match="did not write"):
        write_repository(tmp_path, {"a": "a"}, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_edits_by_hand_are_kept_unless_forced(tmp_path: Path) -> None:
    write_repository(tmp_path, {"a": "1"})
    (tmp_path / "a").write_text("edited")
    with pytest.raises(ConfigError, match=r"changed by hand .*: a;"):
        write_repository(tmp_path, {"a": "2"})
    assert (tmp_path / "a").read_text() == "edited"
    write_repository(tmp_path, {"a": "2"}, force=True)
    assert (tmp_path / "a").read_text() == "2"


def test_a_run_that_was_cut_short_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_repository(tmp_path, {"a": "1", "b": "1"})
    real, calls = Path.unlink, []

    def failing(path: Path, missing_ok: bool = False) -> None:
        calls.append(path)
        raise OSError("disk")

    monkeypatch.setattr(Path, "unlink", failing)
    with pytest.raises(OSError, match="disk"):
        write_repository(tmp_path, {"a": "2"})
    monkeypatch.setattr(Path, "unlink", real)
    assert calls == [tmp_path / "b"]
    write_repository(tmp_path, {"a": "2"})
    assert sorted(p.name for p in tmp_path.iterdir()) == [MANIFEST, "a"]


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x"])
def test_a_manifest_cannot_lead_outside(tmp_path: Path, path: str) -> None:
    manifest = {"schema": "generated/1", "complete": True, "files": {path: "0"}}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="leads out"):
        write_repository(tmp_path, {})


_TREES = st.dictionaries(st.sampled_from(["a/x", "a/y", "b/x", "c"]), st.sampled_from(["1", "2"]))


@settings(deadline=None, max_examples=50)  # it writes files; how long that takes is not the subject
@given(st.lists(_TREES, min_size=1, max_size=4))
def test_the_folder_is_always_the_last_tree(trees: list[dict[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for tree in trees:
            write_repository(folder, tree)
        found = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}
        found.pop(MANIFEST)
        assert found == trees[-1]
        assert not [p for p in folder.rglob("*") if p.is_dir() and not any(p.iterdir())]


def test_the_command_reports_a_refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    placement = tmp_path / "p.yaml"
    placement.write_text(CPU.replace("num_blocks", "num_block"))
    assert main(["generate", "-p", str(placement), "-o", str(tmp_path / "out")]) == 2
    assert f"{placement}:5: instances[1]: unknown key 'num_block'" in capsys.readouterr().err
    placement.write_text(CPU)
    assert main(["generate", "-p", str(placement), "-o", str(tmp_path / "out")]) == 2
    assert f"{placement}:2: model: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["generate", "-p", str(placement), "-o", str(tmp_path / "out"), "--no-machine-check"]) == 0
    assert "2 instances and the orchestrator; 7 files written" in capsys.readouterr().out


def test_unknown_commands_get_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generat"]) == 2
    assert "did you mean 'generate'?" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "generate" in capsys.readouterr().out
