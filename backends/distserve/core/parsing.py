"""Strict parsing of mappings (YAML, JSON) into frozen dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration value is refused. The message names the field, the value and what is allowed."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the closest known name, or a list of the known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(names)}"


def parse(cls: type[T], values: object, where: str) -> T:
    """Builds the dataclass `cls` from a mapping.

    Nested dataclasses, `tuple[X, ...]`, `X | None` and `Literal` fields are followed. Keys that the
    dataclass does not have, wrong types and missing required keys raise `ConfigError` naming `where`.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: expected a mapping, found {type(values).__name__}")
    assert dataclasses.is_dataclass(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for key in values:
        if key not in fields:
            raise ConfigError(f"{where}: unknown key '{key}'{nearest(str(key), fields)}")
    hints = typing.get_type_hints(cls)
    kwargs: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            kwargs[name] = _convert(hints[name], values[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}: missing key '{name}'")
    try:
        return typing.cast(T, cls(**kwargs))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def to_mapping(config: Any) -> dict[str, Any]:
    """The inverse of `parse`: plain dicts and lists, fields at their default left out."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is not dataclasses.MISSING and value == default:
            continue
        out[field.name] = _plain(value)
    return out


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_mapping(value)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(typing.get_args(hint), value, where)
    if origin is typing.Literal:
        if value not in typing.get_args(hint):
            allowed = ", ".join(repr(a) for a in typing.get_args(hint))
            raise ConfigError(f"{where}: {value!r} is not allowed; one of {allowed}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where}: expected a list, found {value!r}")
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a mapping, found {value!r}")
        return dict(value)
    if dataclasses.is_dataclass(hint):
        return (
            value
            if isinstance(value, typing.cast(type, hint))
            else parse(typing.cast(type, hint), value, where)
        )
    return _convert_scalar(hint, value, where)


def _convert_union(args: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in args:
        return None
    errors = []
    for arg in args:
        if arg is type(None):
            continue
        try:
            return _convert(arg, value, where)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _convert_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is Any or hint is object:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where}: expected {hint.__name__}, found {value!r}")
    return value
