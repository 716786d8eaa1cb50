"""Written by `planner generate`. For clients; its settings are in config.pbtxt."""

from distserve.serving.triton_orchestrator import TritonPythonModel

__all__ = ["TritonPythonModel"]
