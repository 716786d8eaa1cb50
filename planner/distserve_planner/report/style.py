"""Colours of the figures and the conversion of matplotlib figures to SVG text and PNG files.

A figure is drawn once in the light colours. In the page every colour becomes a CSS variable, so that the same
SVG serves the light and the dark theme.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distserve.core.parsing import ConfigError

# role -> (light, dark); every light colour is used once, since it stands for its role in the SVG
COLOURS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ink": ("#1c2330", "#e8ebf0"),
        "muted": ("#596273", "#a3adbd"),
        "grid": ("#dde1e7", "#343c4a"),
        "paper": ("#fefefd", "#171b22"),
        "limit": ("#b3261e", "#ff8f85"),
        "high": ("#1f5fbf", "#79aefc"),
        "low": ("#0a8074", "#45cbb8"),
        "chunked": ("#7a3fb3", "#c597f5"),
        "best": ("#c2570c", "#ffa463"),
        "vllm": ("#866400", "#e2bd4a"),
        "own": ("#a81f6b", "#ff8fc6"),
        "stage0": ("#9dbfe9", "#5d7ea8"),
        "stage1": ("#2a66b5", "#84b4f5"),
        "stage2": ("#f0c48a", "#97713c"),
        "stage3": ("#c92f2f", "#ff7b7b"),
        "stage4": ("#3b8f5a", "#6fce91"),
        "shade1": ("#8fb4de", "#3f6ea8"),
        "shade2": ("#5b8fcd", "#5c90d2"),
        "shade3": ("#3570bd", "#8bb8f2"),
        "shade4": ("#164a8f", "#c2dcff"),
    }
)

_RC = MappingProxyType(
    {
        "svg.fonttype": "none",
        "font.family": "DejaVu Sans",
        "font.size": 9.5,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.labelsize": 9.5,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "legend.fontsize": 8.5,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 4.5,
        "grid.linewidth": 0.7,
        "savefig.dpi": 160,
        "svg.hashsalt": "report",
    }
)


def colour(role: str) -> str:
    """The light colour of a role."""
    return COLOURS[role][0]


def require_matplotlib() -> None:
    """Raises `ConfigError` with the fix if the figures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"figures need matplotlib ({error}); install the extra: pip install 'distserve-triton[bench]'"
        ) from None


@contextmanager
def drawing() -> Iterator[None]:
    """The style of all figures; to be held while drawing and while saving."""
    matplotlib: Any = import_module("matplotlib")
    themed = {
        name: colour("ink") for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor")
    } | {name: colour("muted") for name in ("xtick.color", "ytick.color")}
    themed |= {"grid.color": colour("grid"), "axes.facecolor": "none"}
    with matplotlib.rc_context({**_RC, **themed}):
        yield


def new_figure(size: tuple[float, float]) -> tuple[Any, Any]:
    """A matplotlib figure and its axes; inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.add_subplot()


def legend_above(axes: Any, title: str, columns: int = 3) -> None:
    """The legend between title and plot, where no curve can run through it."""
    entries = len(axes.get_legend_handles_labels()[0])
    rows = -(-entries // columns)
    axes.set_title(title, pad=8 + 13 * rows)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.02, 0.985), ncols=columns, columnspacing=1.1, handlelength=1.6,
        handletextpad=0.5, labelspacing=0.25, borderaxespad=0.2,
    )  # fmt: skip


def settle(figure: Any) -> None:
    """Computes the layout once for all the times that the figure is saved."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def svg_text(figure: Any, name: str) -> str:
    """The `<svg>` element to put into a page: theme variables for colours, ids that no other figure has."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text).replace("url(#", f"url(#{name}-")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    for role, (light, _) in COLOURS.items():
        text = text.replace(light, f"var(--{role})")
    return text.replace("'DejaVu Sans'", "var(--figure-font)").strip()


def save_png(figure: Any, path: Path) -> None:
    """Writes the figure in the light colours."""
    figure.savefig(path, format="png", facecolor="white")


def theme_css() -> str:
    """CSS variables of both themes."""
    light = "".join(f"--{role}:{pair[0]};" for role, pair in COLOURS.items())
    dark = "".join(f"--{role}:{pair[1]};" for role, pair in COLOURS.items())
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
