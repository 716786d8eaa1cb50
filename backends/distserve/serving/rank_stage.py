"""The Triton model that hosts ranks of an instance which another node's server has: see
`distserve.worker.rank_host`.
"""

from __future__ import annotations

import json

import triton_python_backend_utils as pb_utils

from distserve.core.logs import log_package_to_stderr
from distserve.core.parsing import ConfigError
from distserve.core.rank_host_config import RANKS_PARAMETER, RankHostConfig
from distserve.core.secret_file import shared_secret
from distserve.serving import stage
from distserve.serving.orchestrator_config import model_parameter
from distserve.worker.rank_host import RankHost


class TritonPythonModel(stage.TritonPythonModel):
    """Ready at once, whether rank 0 is there or not."""

    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"]).get("parameters")
        try:
            text = model_parameter(parameters, RANKS_PARAMETER)
            config = RankHostConfig.load(json.loads(text))
            shared_secret(config.transfer_secret_file)
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        log_package_to_stderr(config.log_format, f"{config.instance}/{','.join(map(str, config.ranks))}")
        self.serve(RankHost(config))
