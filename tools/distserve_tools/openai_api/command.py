"""`distserve openai`: run the front end."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from distserve.core.model_config import ModelConfig, resolve_model
from distserve.core.parsing import ConfigError

DESCRIPTION = "Serve /v1/completions and /v1/chat/completions in front of a running Triton server."
EXAMPLES = """examples:
  distserve openai --model cache:smollm2-135m-instruct --grpc localhost:8001
  DISTSERVE_API_KEY=secret distserve openai --model ./llama --name llama --port 9000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--model", required=True, help="folder of the served model, or cache:NAME (tokenizer)"
    )
    parser.add_argument("--name", help="name towards clients (default: the folder's name)")
    parser.add_argument("--grpc", default="localhost:8001", help="Triton's gRPC endpoint (%(default)s)")
    parser.add_argument(
        "--metrics-url", default="http://localhost:8002/metrics", help="Triton's metrics (%(default)s)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (%(default)s)")
    parser.add_argument(
        "--request-timeout",
        type=float,
        default=600.0,
        help="seconds until a request is given up (%(default)s)",
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="for requests in flight, on stop (%(default)s)",
    )
    parser.add_argument(
        "--api-key-env",
        default="DISTSERVE_API_KEY",
        help="environment variable with the API key; none is asked for if it is unset (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    import uvicorn

    from distserve_tools.openai_api.app import FrontEnd, FrontEndConfig
    from distserve_tools.openai_api.tokenizer import ChatTokenizer

    try:
        folder = resolve_model(args.model)
        model = ModelConfig.load(folder)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    config = FrontEndConfig(
        grpc_url=args.grpc,
        metrics_url=args.metrics_url,
        model_name=args.name or Path(folder).name,
        max_context=model.max_context,
        api_key=os.environ.get(args.api_key_env) or None,
        request_timeout_s=args.request_timeout,
    )
    app = FrontEnd(config, ChatTokenizer(folder)).app()
    drain_s = max(1, round(args.drain_timeout))
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning", timeout_graceful_shutdown=drain_s)
    return 0
