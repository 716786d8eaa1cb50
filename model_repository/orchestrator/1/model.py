"""Written by `planner generate`. For clients; its settings are in config.pbtxt."""

from distserve.serving.orchestrator import TritonPythonModel

__all__ = ["TritonPythonModel"]
