"""Written by `planner generate`. An instance; its settings are in config.pbtxt."""

from distserve.serving.stage import TritonPythonModel

__all__ = ["TritonPythonModel"]
