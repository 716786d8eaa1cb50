"""Reading and writing the planner's YAML documents, each marked `schema: <name>/<version>`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from distserve.core.parsing import ConfigError, parse, to_mapping

T = TypeVar("T")


def load_document(path: str | Path, schema: str, cls: type[T]) -> T:
    """Parses the YAML file `path` into the frozen dataclass `cls`.

    Raises `ConfigError` naming the file and the field: a missing file, YAML that does not parse, another
    schema than `schema`, unknown keys (with the nearest known one) and wrong types.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    return parse_document(text, schema, cls, str(path))


def parse_document(text: str, schema: str, cls: type[T], where: str) -> T:
    """As `load_document`, from text; `where` names it in errors."""
    try:
        values = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not YAML ({error})") from None
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{where}: expected a mapping with 'schema: {schema}', found {type(values).__name__}"
        )
    found = values.get("schema")
    if found != schema:
        raise ConfigError(f"{where}: schema={found!r}; this reader needs 'schema: {schema}'")
    return parse(cls, {k: v for k, v in values.items() if k != "schema"}, where)


def dump_document(value: Any, schema: str) -> str:
    """The YAML text of a dataclass; fields at their default are left out. Inverse of `parse_document`."""
    document = {"schema": schema, **to_mapping(value)}
    return str(yaml.safe_dump(document, sort_keys=False, width=110, default_flow_style=None))


def save_document(path: str | Path, value: Any, schema: str) -> None:
    """Writes `dump_document` to `path`."""
    Path(path).write_text(dump_document(value, schema), encoding="utf-8")
