"""Devices that ship with the planner: specifications with fitted efficiencies, and measured profiles."""

from distserve_planner.devices.catalog import device_names, device_spec, latency_model, shipped_profile
from distserve_planner.devices.spec import DeviceSpec, Efficiency

__all__ = ["DeviceSpec", "Efficiency", "device_names", "device_spec", "latency_model", "shipped_profile"]
