"""Checkpoints: sharded and headless ones load, every fault gives one error that names the file or tensor."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import model_zoo
from dense_attention import DenseAttention
from distserve.core.model_config import ModelConfig
from distserve.models.base import Model
from distserve.models.fingerprint import model_fingerprint
from distserve.models.loader import Checkpoint
from distserve.models.registry import build_model, load_model
from distserve.models.weights import ModelLoadError
from distserve.worker.parallel import ParallelGroup
from model_zoo import Zoo, make_checkpoint

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy(zoo: Zoo, tmp_path: Path) -> Callable[[str], Path]:
    """`copy(name)`: a checkpoint of the zoo that the test may damage."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(zoo(name).folder, tmp_path / name))

    return make


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(folder, ParallelGroup(), None, dtype, "cpu")


def logits(folder: Path) -> torch.Tensor:
    tokens = model_zoo.prompt(12)
    model = load(folder)
    return model.logits(model.forward(torch.tensor(tokens), torch.arange(12), DenseAttention()))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_sharded_checkpoint_equals_the_single_file(zoo: Zoo, tmp_path: Path) -> None:
    sharded = make_checkpoint(tmp_path / "sharded", "llama", max_shard_size="100KB").folder
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert torch.equal(logits(sharded), logits(zoo("llama").folder))
    assert model_fingerprint(sharded) == model_fingerprint(zoo("llama").folder)


@pytest.mark.parametrize(
    ("name", "prefix"), [("llama-gqa-tied", "model."), ("opt", "model."), ("gpt2", "transformer.")]
)
def test_names_saved_without_the_head_are_found(copy: Callable[[str], Path], name: str, prefix: str) -> None:
    folder = copy(name)
    expected = logits(folder)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.removeprefix(prefix)] = tensors.pop(key)

    edit_tensors(folder, rename)
    assert torch.equal(logits(folder), expected)


def test_weights_are_converted_while_they_are_loaded(copy: Callable[[str], Path], zoo: Zoo) -> None:
    folder = copy("llama")
    edit_tensors(folder, lambda tensors: tensors.update({k: t.bfloat16() for k, t in tensors.items()}))
    rounded = logits(folder)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - logits(zoo("llama").folder)).abs().max() < 0.2
    assert load(folder, torch.bfloat16).dtype == torch.bfloat16


def fault(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as error:
        load(folder)
    return str(error.value)


def test_missing_tensor(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert fault(folder) == (
        f"{folder}: tensor 'model.layers.1.mlp.up_proj.weight' [151, 64] is missing from the weights"
    )


def test_misshapen_tensor(copy: Callable[[str], Path]) -> None:
    folder, name = copy("gpt2"), "transformer.h.0.mlp.c_fc.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name].t().contiguous()}))
    assert (
        fault(folder)
        == f"{folder / WEIGHTS}: tensor {name!r} has shape [256, 64], config.json wants [64, 256]"
    )


def test_configuration_that_does_not_fit_the_weights(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    edit_config(folder, vocab_size=300)
    assert "tensor 'model.embed_tokens.weight' has shape [263, 64], config.json wants [300, 64]" in fault(
        folder
    )


def test_tensor_that_is_no_float(copy: Callable[[str], Path]) -> None:
    folder, name = copy("llama"), "model.norm.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    assert f"tensor {name!r} has dtype I8; supported: F64, F32, F16, BF16" in fault(folder)


@pytest.mark.parametrize("kept", [0, 5, 2000, -1])
def test_truncated_file(copy: Callable[[str], Path], kept: int) -> None:
    folder = copy("llama")
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:kept])
    assert fault(folder).startswith(f"{path}: not a complete safetensors file, truncated or damaged")


def test_pickled_weights_are_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    assert "has only pytorch_model.bin; pickled weights can run code and are not loaded" in fault(folder)


def test_folder_without_weights(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / WEIGHTS).unlink()
    assert fault(folder) == f"{folder}: neither {WEIGHTS} nor {INDEX} found"


def test_unsupported_architecture(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    edit_config(folder, model_type="mamba")
    assert "model_type='mamba' is not supported; one of gpt2, llama, mistral, opt, qwen2, qwen3" in fault(
        folder
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} is not supported"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope_scaling.rope_type='yarn'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("opt", {"activation_function": "swish7"}, "activation 'swish7' is not supported for opt"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm=True is not supported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ],
)
def test_unsupported_settings(
    copy: Callable[[str], Path], name: str, change: dict[str, Any], message: str
) -> None:
    folder = copy(name)
    edit_config(folder, **change)
    assert message in fault(folder)


def test_no_folder(tmp_path: Path) -> None:
    assert "config.json: not found" in fault(tmp_path / "nowhere")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "sharded", "llama", max_shard_size="100KB").folder


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert fault(sharded) == f"{shard}: not found, though {INDEX} names it"


def test_index_that_does_not_fit_its_files(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    wrong = files[0] if index["weight_map"]["model.norm.weight"] != files[0] else files[1]
    index["weight_map"]["model.norm.weight"] = wrong
    (sharded / INDEX).write_text(json.dumps(index))
    assert fault(sharded) == f"{sharded / INDEX}: tensor 'model.norm.weight' is not in {wrong}"


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", 7])
def test_index_that_leaves_the_folder(sharded: Path, name: object) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert f"weight_map names {name!r}; plain file names are allowed" in fault(sharded)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', "{}"])
def test_damaged_index(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    assert fault(sharded).startswith(f"{sharded / INDEX}: no usable weight_map")


def test_a_slice_is_what_indexing_gives(zoo: Zoo) -> None:
    name, shape = "model.layers.0.mlp.up_proj.weight", (151, 64)
    with Checkpoint(zoo("llama").folder) as weights:
        whole = weights.read(name, shape)
        assert torch.equal(weights.read(name, shape, range(3, 9), range(60, 64)), whole[3:9, 60:64])
        assert torch.equal(weights.read(name, shape, cols=range(1, 2)), whole[:, 1:2])


def test_fingerprint_tells_checkpoints_apart(copy: Callable[[str], Path], zoo: Zoo) -> None:
    folder = copy("llama")
    original = model_fingerprint(folder)
    assert original == model_fingerprint(zoo("llama").folder)
    assert len(original) == 32
    edit_tensors(folder, lambda tensors: tensors["model.layers.2.mlp.up_proj.weight"][0, 0].add_(1))
    weights_changed = model_fingerprint(folder)
    edit_config(folder, rms_norm_eps=1e-3)
    assert len({original, weights_changed, model_fingerprint(folder), model_fingerprint(copy("qwen2"))}) == 4


def test_fingerprint_of_a_damaged_file(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    for content in (b"", b"\xff" * 64, b"\x05" + bytes(7) + b"{no}"):
        (folder / WEIGHTS).write_bytes(content)
        with pytest.raises(ModelLoadError, match="not a readable safetensors file"):
            model_fingerprint(folder)


MEASURE_LOAD = """
import sys, threading, time
import torch
from distserve.models.registry import load_model
from distserve.worker.parallel import ParallelGroup

def anonymous():  # what is not a mapped file, which the system can drop
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024

def sample():
    while not ended.wait(0.001):
        peak[0] = max(peak[0], anonymous())

torch.set_num_threads(1)
before = anonymous()
peak, ended = [before], threading.Event()
thread = threading.Thread(target=sample)
thread.start()
model = load_model(sys.argv[1], ParallelGroup(), None, getattr(torch, sys.argv[2]), "cpu", sys.argv[3])
ended.set()
thread.join()
print(peak[0] - before, anonymous() - before)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("prepack", ["off", "packed"])
def test_a_load_takes_no_more_host_memory_than_its_weights_and_a_tensor(
    tmp_path: Path, dtype: str, prepack: str
) -> None:
    """From a checkpoint in fp32: weights in one plain copy, as on a GPU, or in one packed copy."""
    sizes = {"hidden_size": 512, "intermediate_size": 8192, "num_hidden_layers": 4}
    folder = make_checkpoint(tmp_path / "m", "llama", max_shard_size="40MB", overrides=sizes).folder
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    itemsize = getattr(torch, dtype).itemsize
    weights = ModelConfig.load(folder).param_count() * itemsize
    largest = 2 * 8192 * 512 * itemsize  # gate and up, which are one matrix here
    command = [sys.executable, "-c", MEASURE_LOAD, str(folder), dtype, prepack]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    peak, kept = map(int, done.stdout.split())
    assert 0.9 * weights < kept < weights + (24 << 20)
    assert peak < weights + 2 * largest + (24 << 20) < 1.8 * weights


def test_a_long_load_tells_how_far_it_is(zoo: Zoo) -> None:
    from distserve.models.progress import ReportedSource

    now, seen = [0.0], []

    class Slow(Checkpoint):
        def read(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            now[0] += 1.5
            return super().read(*args, **kwargs)

    config = ModelConfig.load(zoo("llama").folder)
    with Slow(zoo("llama").folder) as weights:
        source = ReportedSource(
            weights, config.param_count(), lambda *told: seen.append(told), 5.0, lambda: now[0]
        )
        build_model(config, ParallelGroup(), None, torch.float32, "cpu", source)
    assert [round(seconds) for _, _, seconds in seen] == list(range(6, round(now[0]) + 1, 6))
    reads = [read for read, _, _ in seen]
    assert reads == sorted(set(reads))
    assert 0.8 * config.param_count() < reads[-1] <= config.param_count() == seen[0][1]
