"""YAML that remembers on which line each value stands, so that an error can name it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from distserve.core.parsing import ConfigError, parse

T = TypeVar("T")
KeyPath = tuple[str | int, ...]

ROOT = "document"
"""The `where` that `parse` is given for a document's outermost mapping."""

_WHERE = re.compile(r"^document(?P<path>(?:\.\w+|\[\d+\])*): (?P<text>.*)$", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_FIELD = re.compile(r"^(?:unknown key '([^']+)'|(\w+)=)")


@dataclass(frozen=True)
class LocatedYaml:
    """A YAML document as plain values, and the line (from 1) of every key and item."""

    name: str
    values: Any
    lines: Mapping[KeyPath, int]

    @classmethod
    def read(cls, path: str | Path) -> LocatedYaml:
        """Raises `ConfigError` for a missing file, text that is not YAML, or a key given twice."""
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 text ({error})") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str) -> LocatedYaml:
        """Like `read`, from a string; `name` stands for the file in messages."""
        lines: dict[KeyPath, int] = {(): 1}
        try:
            loader = yaml.SafeLoader(text)
            root = loader.get_single_node()
            if root is not None:
                _note_lines(root, (), lines, name)
            values = None if root is None else loader.construct_document(root)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ConfigError(f"{name}:{line}: not YAML: {error.problem}") from None
        except (yaml.YAMLError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{name}: not YAML: {error}") from None
        return cls(name, values, lines)

    def line(self, path: KeyPath) -> int:
        """Line of a value, or of the nearest one around it."""
        while path not in self.lines:
            path = path[:-1]
        return self.lines[path]

    def located(self, path: KeyPath, text: str) -> str:
        """`file:line: a.b[1]: text`"""
        dotted = _dotted(path)
        return f"{self.name}:{self.line(path)}: {dotted + ': ' if dotted else ''}{text}"

    def into(self, cls: type[T]) -> T:
        """Parses into a dataclass; a refused value is reported with its line (`ConfigError`)."""
        try:
            return parse(cls, self.values, ROOT)
        except ConfigError as error:
            raise self.relocated(error) from None

    def relocated(self, error: ConfigError) -> ConfigError:
        """The same error with file and line, from one of `parse` whose `where` began with `ROOT`."""
        match = _WHERE.match(str(error))
        if match is None:
            return ConfigError(f"{self.name}: {error}")
        path: KeyPath = tuple(step[1] if step[1] else int(step[2]) for step in _STEP.finditer(match["path"]))
        field = _FIELD.match(match["text"])
        inner = (*path, (field[1] or field[2])) if field else path
        line = self.line(inner if inner in self.lines else path)
        dotted = _dotted(path)
        return ConfigError(f"{self.name}:{line}: {dotted + ': ' if dotted else ''}{match['text']}")


def check_schema(document: LocatedYaml, expected: str) -> None:
    """Raises `ConfigError` unless the document is a mapping with `schema: expected`."""
    if not isinstance(document.values, Mapping):
        raise ConfigError(f"{document.name}:1: expected a mapping that begins with 'schema: {expected}'")
    found = document.values.get("schema")
    if found != expected:
        raise ConfigError(
            document.located(("schema",), f"{found!r} is not supported; this version reads '{expected}'")
        )


def _dotted(path: KeyPath) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


def _note_lines(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], name: str) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value))
            line = key.start_mark.line + 1
            if inner in lines:
                raise ConfigError(f"{name}:{line}: '{key.value}' was given before, on line {lines[inner]}")
            lines[inner] = line
            _note_lines(value, inner, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            _note_lines(item, (*path, index), lines, name)
