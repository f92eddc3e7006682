"""A local web page that shows a store: overview, episodes, checkpoints, and a run as it writes.

serving         `Viewer`, which serves the page on 127.0.0.1
export          `export_page`, which writes it as one file
application     the paths that are served, and how errors are answered
access          who may ask
connections     clients that are slow, and the end of the server
live_view       the store as it was last read, and what was computed from it
overview        facts and plots of the whole store
run_history     sessions and checkpoints as the rows of a graph
episode_list    the table of episodes: filtered, sorted, paged
episode_page    one episode: fields, metadata, frames
series          a field over time, shortened for a plot
frames, png     frames as images
page            the HTML page, with its scripts and styles inside
json_numbers    numbers of arrays as JSON has them
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trajstore.viewer.export import export_page
    from trajstore.viewer.serving import Viewer

__all__ = ["Viewer", "export_page"]

_MODULES = {"Viewer": "serving", "export_page": "export"}


def __getattr__(name: str) -> Any:
    """Import what is asked for at its first use: an export needs no server."""
    if name not in _MODULES:
        raise AttributeError(f"module 'trajstore.viewer' has no attribute {name!r}")
    return getattr(import_module(f"trajstore.viewer.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
