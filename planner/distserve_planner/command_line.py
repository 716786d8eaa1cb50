"""Sub-commands of a console script: one module each, imported only when it is the one that runs."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distserve.core.parsing import ConfigError, nearest


@dataclass(frozen=True)
class Command:
    """A module with `add_arguments(parser)` and `run(args)->int`; `name` may be two words, "bench engine"."""

    name: str
    module: str
    summary: str


def commands_in(package: str) -> tuple[Command, ...]:
    """The commands of a package: each module is one, its docstring's first line the summary.

    Found without importing them, since some import slow libraries.
    """
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    found = []
    for info in sorted(pkgutil.iter_modules(folders), key=lambda info: info.name):
        module = importlib.util.find_spec(f"{package}.{info.name}")
        if module is not None and module.origin is not None:
            text = ast.get_docstring(ast.parse(Path(module.origin).read_text())) or ""
            name = info.name.replace("_", "-")
            found.append(Command(name, module.name, text.partition("\n")[0].rstrip(".")))
    return tuple(found)


def dispatch(prog: str, about: str, commands: Sequence[Command], argv: Sequence[str] | None = None) -> int:
    """Runs the sub-command that `argv` (default: the process's arguments) begins with.

    Returns the exit code; 2 for a refused argument or configuration, which is reported on stderr.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_overview(prog, about, commands))
        return 0 if words else 2
    command, rest = _find(commands, words)
    group = [c for c in commands if c.name.startswith(f"{words[0]} ")]
    if command is None and group and words[1:] in ([], ["-h"], ["--help"]):
        sys.stdout.write(_overview(prog, about, group))
        return 0 if words[1:] else 2
    if command is None:
        hint = nearest(" ".join(words[:1]), [c.name for c in commands])
        sys.stderr.write(f"{prog}: unknown command '{words[0]}'{hint}\n")
        return 2
    module = importlib.import_module(command.module)
    parser = argparse.ArgumentParser(prog=f"{prog} {command.name}", description=module.__doc__)
    module.add_arguments(parser)
    try:
        return int(module.run(parser.parse_args(rest)))
    except ConfigError as error:
        sys.stderr.write(f"{prog} {command.name}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _find(commands: Sequence[Command], words: list[str]) -> tuple[Command | None, list[str]]:
    for count in (2, 1):
        for command in commands:
            if command.name.split() == words[:count]:
                return command, words[count:]
    return None, words


def _overview(prog: str, about: str, commands: Sequence[Command]) -> str:
    width = max((len(c.name) for c in commands), default=0)
    lines = [f"usage: {prog} COMMAND [options]", "", about, "", "commands:"]
    lines += [f"  {c.name:<{width}}  {c.summary}" for c in commands]
    lines += ["", f"{prog} COMMAND --help shows the options of one.", ""]
    return "\n".join(lines)
