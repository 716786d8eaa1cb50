"""The secret that the hosts of one deployment share: a file, white space around it left out."""

from __future__ import annotations

from pathlib import Path

from distserve.core.parsing import ConfigError

MIN_SECRET_BYTES = 16


def read_secret(file: str | Path, field: str = "transfer_secret_file") -> bytes:
    """Raises `ConfigError` that names `field` if the file can't be read or holds too little."""
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{field}={str(file)!r}: {error.strerror}") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{field}={str(file)!r}: {len(secret)} bytes; must have at least {MIN_SECRET_BYTES}"
        )
    return secret


def shared_secret(file: str | None) -> bytes | None:
    """The same of a configuration's `transfer_secret_file`; None: there is none. Raises `ConfigError`."""
    return None if file is None else read_secret(file)
