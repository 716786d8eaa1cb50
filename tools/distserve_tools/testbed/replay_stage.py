"""The Triton model of a load-only instance: the real stage, with `replay_engine` as its engine process."""

from __future__ import annotations

import json
import sys

from distserve.serving.orchestrator_config import model_parameter
from distserve.serving.stage import MODEL_PARAMETER
from distserve.serving.stage import TritonPythonModel as Stage
from distserve.serving.supervisor import Supervisor

__all__ = ["TritonPythonModel"]


class TritonPythonModel(Stage):
    """See module; everything but the start is the real one's."""

    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"]).get("parameters")
        self.serve(Supervisor(model_parameter(parameters, MODEL_PARAMETER), replay_command))


def replay_command(fd: int) -> list[str]:
    """How the engine process is started."""
    return [sys.executable, "-m", "distserve_tools.testbed.replay_engine", "--fd", str(fd)]
