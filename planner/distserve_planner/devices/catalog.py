"""Finds a latency model by device and model name among the shipped specifications and profiles."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from distserve.core.parsing import ConfigError, nearest
from distserve_planner.devices.roofline import roofline_model
from distserve_planner.devices.spec import DEVICE_SCHEMA, DeviceSpec
from distserve_planner.latency import LatencyModel
from distserve_planner.models_catalog import model_dimensions
from distserve_planner.profile_file import Profile
from distserve_planner.schema_file import parse_document

_ANALYTIC = "-roofline"


def device_names() -> tuple[str, ...]:
    """Known devices. `NAME-roofline` asks for the analytic model where a measured profile ships too."""
    specs, sets = _names(_data("devices")), _names(_data("profiles"))
    return tuple(sorted({*specs, *sets, *(f"{name}{_ANALYTIC}" for name in specs if name in sets)}))


def device_spec(name: str) -> DeviceSpec:
    """Data sheet and efficiencies; raises `ConfigError` with the nearest known name."""
    names = _names(_data("devices"))
    base = next((n for n in names if name in (n, n + _ANALYTIC) or name.startswith(n + "-")), None)
    if base is None:
        raise ConfigError(f"device={name!r} is not known{nearest(name, device_names())}")
    text = (_data("devices") / f"{base}.yaml").read_text("utf-8")
    return parse_document(text, DEVICE_SCHEMA, DeviceSpec, base)


def shipped_profile(device: str, model_name: str) -> Profile | None:
    """The measured profile of a model on a device, if one ships."""
    model = model_name.rsplit("/", 1)[-1].lower()
    item = _data("profiles") / device / f"{model}.yaml"
    return Profile.parse(item.read_text("utf-8"), f"{device}/{model}") if item.is_file() else None


def latency_model(device: str, model_name: str, dtype: str | None = None) -> LatencyModel:
    """Latency of `model_name` on `device`: a profile file, else a shipped profile, else the roofline.

    dtype: default is the profile's, or the model's own with fp16 in place of fp32. Raises `ConfigError`
    for unknown names, and for a profile of another model or dtype.
    """
    if device.endswith((".yaml", ".yml")) or Path(device).is_file():
        return _matching(Profile.load(device), device, model_name, dtype)
    if device not in device_names():
        raise ConfigError(
            f"device={device!r}: neither a profile file nor known{nearest(device, device_names())}"
        )
    profile = shipped_profile(device, model_name)
    if profile is not None and dtype in (None, profile.dtype):
        return profile.latency_model()
    model = model_dimensions(model_name)
    wanted = dtype or ("fp16" if model.dtype == "fp32" else model.dtype)
    return roofline_model(model_name, model, device_spec(device), wanted)


def _matching(profile: Profile, where: str, model_name: str, dtype: str | None) -> LatencyModel:
    if dtype not in (None, profile.dtype):
        raise ConfigError(f"{where}: measured in dtype={profile.dtype}, asked for {dtype}")
    if model_name != profile.model_name:
        asked = model_dimensions(model_name)
        differs = [f for f in _DIMENSIONS if getattr(asked, f) != getattr(profile.model, f)]
        if differs:
            raise ConfigError(
                f"{where}: a profile of {profile.model_name}, not of {model_name}: "
                + ", ".join(f"{f}={getattr(profile.model, f)} for {getattr(asked, f)}" for f in differs)
            )
    return profile.latency_model()


_DIMENSIONS = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size")


def _data(kind: str) -> Traversable:
    return resources.files("distserve_planner.devices") / "data" / kind


def _names(folder: Traversable) -> tuple[str, ...]:
    return tuple(sorted(item.name.removesuffix(".yaml") for item in folder.iterdir()))
