"""From a configuration, or a folder, to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from distserve.core.model_config import Arch, ModelConfig
from distserve.core.parsing import ConfigError
from distserve.models.base import Model
from distserve.models.gpt2 import build_gpt2
from distserve.models.layers import Builder
from distserve.models.linear import Prepack, host_memory_bytes, mkl_is_native, plan_linears
from distserve.models.llama import LlamaModel
from distserve.models.loader import Checkpoint
from distserve.models.opt import build_opt
from distserve.models.progress import ReportedSource, log_progress
from distserve.models.weights import ModelLoadError, WeightSource
from distserve.worker.parallel import ParallelGroup

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

_BUILD: Mapping[Arch, Callable[[ModelConfig, Builder, range], Model]] = {
    "llama": LlamaModel,
    "opt": build_opt,
    "gpt2": build_gpt2,
}


def build_model(
    config: ModelConfig,
    group: ParallelGroup,
    layers: range | None,
    dtype: torch.dtype,
    device: torch.device | str,
    weights: WeightSource,
    prepack: Prepack = "auto",
) -> Model:
    """One rank's part: its slice (`group.rank` of `group.size`) of `layers` (None: all).

    `prepack`: see `plan_linears`. Raises `ModelLoadError` for weights that do not fit the configuration and
    `ConfigError` for a group whose size the heads do not allow.
    """
    device = torch.device(device)
    layers = range(config.num_layers) if layers is None else layers
    share = len(layers) / config.num_layers / group.size
    plan = plan_linears(
        prepack,
        device,
        dtype,
        weight_bytes=int(config.param_count() * share) * dtype.itemsize,
        memory_bytes=host_memory_bytes(),
        mkl_is_native=mkl_is_native(),
    )
    return _BUILD[config.arch](config, Builder(weights, group, dtype, device, plan), layers)


def load_model(
    folder: str | Path,
    group: ParallelGroup,
    layers: range | None,
    dtype: torch.dtype,
    device: torch.device | str,
    prepack: Prepack = "auto",
) -> Model:
    """`build_model` on a Hugging Face folder. Each rank reads its own slice only, tensor by tensor from the
    mapped file to its place on the device: host memory holds no second copy. Long loads tell their progress.

    Raises `ModelLoadError` for everything that is wrong with the folder; the message names file or tensor.
    """
    try:
        config = ModelConfig.load(folder)
    except ConfigError as error:
        raise ModelLoadError(str(error)) from error
    share = (len(layers) if layers is not None else config.num_layers) / config.num_layers / group.size
    with Checkpoint(folder) as weights:
        total = max(1, int(config.param_count() * share))
        reported = ReportedSource(weights, total, log_progress(f"loading {Path(folder).name}"))
        return build_model(config, group, layers, dtype, device, reported, prepack)
