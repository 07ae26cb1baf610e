"""A trajectory as a widget in a notebook: the page's own grid, drawn by the page's own JavaScript modules."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerjump.lens.trajectory import Trajectory

_ENTRY = "notebook.js"
_IMPORT = re.compile(r'from "\./([\w.]+)"')
# Modules import each other by name, and a widget is one module: each becomes a Blob, which others import by address.
_LOADER = """
const SOURCES = %s;
const STYLE = %s;
const addresses = {};

function addressOf(name) {
  if (!(name in addresses)) {
    const source = SOURCES[name].replace(/from "\\.\\/([\\w.]+)"/g, (_, other) => `from "${addressOf(other)}"`);
    addresses[name] = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  }
  return addresses[name];
}

export default {
  async render(context) {
    const { render } = await import(addressOf("%s"));
    return render(context, STYLE);
  },
};
"""


def has_widgets() -> bool:
    """Whether anywidget is installed (`pip install "layerjump[notebook]"`)."""
    return importlib.util.find_spec("anywidget") is not None


def make_widget(trajectory: Trajectory) -> Any:
    """Return an anywidget that shows a trajectory; while a kernel runs, it computes the ranks of pinned tokens."""
    import anywidget
    import traitlets

    class TrajectoryWidget(anywidget.AnyWidget):
        """The grid of levels and positions, the selected cell, pinned tokens."""

        _esm = widget_module()
        reading = traitlets.Dict().tag(sync=True)
        pins = traitlets.List(traitlets.Int()).tag(sync=True)

    def follow(change: Any) -> None:
        widget.reading = trajectory.with_tracked(change["new"]).to_dict()

    tracked = [track.id for track in trajectory.tracked]
    widget = TrajectoryWidget(reading=trajectory.to_dict(), pins=tracked)
    widget.observe(follow, names="pins")
    return widget


@cache
def widget_module() -> str:
    """Return the widget's one module: the page's modules that it needs, and the page's style in a shadow root."""
    package = files("layerjump")
    sources: dict[str, str] = {}
    names = [_ENTRY]
    while names:
        name = names.pop()
        if name not in sources:
            sources[name] = (package / "server" / "static" / name).read_text(encoding="utf-8")
            names += _IMPORT.findall(sources[name])
    style = (package / "report" / "templates" / "colours.css").read_text(encoding="utf-8")
    style += (package / "server" / "static" / "style.css").read_text(encoding="utf-8")
    style = re.sub(r"^:root", ":host", style, flags=re.MULTILINE)
    style = re.sub(r"^(\s*)body \{", r"\1.page {", style, flags=re.MULTILINE)
    style += ".page { padding: .25rem; max-width: none; } .scroll { max-height: 32rem; }"
    return _LOADER % (json.dumps(sources), json.dumps(style), _ENTRY)
