"""Where a launcher leaves the secret of its server for the tools of the same user, and how these find it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from distserve.core.model_config import cache_folder
from distserve.core.secret_file import read_secret
from distserve.serving.access import Access

_LOG = logging.getLogger(__name__)


def access_of(repository: Path) -> Access:
    """Of a server: from the secret that its models share with other hosts, or one that is made now.

    Raises `ConfigError` for a secret that can't be read.
    """
    for path in sorted(repository.glob("*/config.pbtxt")):
        config: Any = model_config_pb2.ModelConfig()
        try:
            text_format.Parse(path.read_text(), config)
        except (OSError, text_format.ParseError):
            continue  # the server will say so
        for parameter in config.parameters.values():
            if file := _secret_file(parameter.string_value):
                return Access.shared(read_secret(file))
    return Access.made()


def _secret_file(parameter: str) -> str | None:
    try:
        values = json.loads(parameter)
    except ValueError:
        return None
    file = values.get("transfer_secret_file") if isinstance(values, dict) else None
    return str(file) if file else None


@contextlib.contextmanager
def left_for_tools(grpc_url: str, access: Access) -> Iterator[Path]:
    """While the block runs, `found` finds the secret of the server at `grpc_url` (host:port); if it can be
    written: the cache may be read-only.
    """
    path = _file(grpc_url)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)  # of a launcher that was killed; rights are given to new files only
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(access.secret.hex())
    except OSError as error:
        _LOG.warning("%s: %s; `distserve apply` needs --secret-file", path, error.strerror)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def found(grpc_url: str, secret_file: Path | None = None) -> Access | None:
    """Of the server at `grpc_url`: from the file if one is given, else from what its launcher left on this
    machine; None: it left nothing for this user. Raises `ConfigError`.
    """
    if secret_file is not None:
        return Access.shared(read_secret(secret_file, "--secret-file"))
    try:
        return Access(bytes.fromhex(_file(grpc_url).read_text()))
    except (OSError, ValueError):
        return None


def _file(grpc_url: str) -> Path:
    host, _, port = grpc_url.rpartition(":")
    host = "127.0.0.1" if host in ("localhost", "0.0.0.0", "") else host
    return cache_folder() / "servers" / f"{host}_{port}".replace("/", "_")
