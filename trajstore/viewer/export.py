"""Writes the page as one file that holds what it shows."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np

from trajstore.credentials import redacted
from trajstore.errors import DataError, TrajstoreError
from trajstore.format.handles import EpisodeKey
from trajstore.schema import Array
from trajstore.store.checkpoints import list_checkpoints
from trajstore.store.store import Store
from trajstore.viewer import overview, run_history
from trajstore.viewer.episode_list import EpisodeList
from trajstore.viewer.episode_page import EpisodePage
from trajstore.viewer.json_numbers import plain, to_json
from trajstore.viewer.live_view import Moment
from trajstore.viewer.page import exported_page

MAX_ROWS = 2000  # of the episode table
N_EPISODES = 8  # with series and frames, if none are named
N_FRAMES = 24  # of a field of an episode
POINTS = 400  # of a series
MAX_BYTES = 24 << 20  # of what the file holds; what does not fit is left out
_SPARED = 64 << 10  # bytes kept for the notes


def export_page(
    store: Store,
    path: str | os.PathLike[str],
    *,
    episodes: Sequence[int | EpisodeKey | tuple[str, int]] | None = None,
    max_bytes: int = MAX_BYTES,
    exist_ok: bool = False,
    secrets: tuple[str, ...] = (),
) -> str:
    """Write a page that shows a store to one file, which needs no server and loads nothing.

    It has the overview, the first `MAX_ROWS` episodes as a table, and some episodes with shortened series and some
    frames. The page says what was left out.

    Args:
        store: The store.
        path: The file to write, in a local directory.
        episodes: Rows or keys of the episodes with series and frames; by default eight, spread over the store.
        max_bytes: Bytes that the file takes at most; episodes and frames that do not fit are left out.
        exist_ok: Replace an existing file.
        secrets: Texts that the file must not hold, such as values of storage options.

    Returns:
        What was left out, in one sentence.

    Raises:
        DataError: The file exists, or the overview alone takes more than ``max_bytes``.
        EpisodeNotFoundError: An episode does not exist.
    """
    target = Path(path)
    if target.exists() and not exist_ok:
        raise DataError(f"{target} exists already; choose another file, or pass exist_ok=True to replace it")
    moment = Moment(1, store.snapshot, ())
    contents = _Contents(max_bytes, secrets)
    rows = _table(contents, moment)
    chosen = _chosen(moment, episodes)
    included = sum(contents.add_episode(moment, key) for key in chosen)
    note = _note(store.url, moment, rows, included, len(chosen), contents)
    page = exported_page(contents.data | {"note": note, "written_at": time.time()})
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    try:
        partial.write_bytes(page)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return note


def _chosen(moment: Moment, episodes: Sequence[int | EpisodeKey | tuple[str, int]] | None) -> list[EpisodeKey]:
    table = moment.snapshot.episodes
    if episodes is None:
        rows = np.unique(np.linspace(0, len(table) - 1, min(N_EPISODES, len(table))).round().astype(np.int64))
        return [table.key(int(i)) for i in rows]
    keys = [table.key(int(e)) if isinstance(e, (int, np.integer)) else EpisodeKey(*e) for e in episodes]
    for key in keys:
        table.find(key)  # raises
    return list(dict.fromkeys(keys))


def _table(contents: _Contents, moment: Moment) -> int:
    """Add the overview and the table of episodes; returns how many rows it has."""
    snapshot = moment.snapshot
    for name, compute in (
        ("facts", overview.facts),
        ("plots", overview.plots),
        ("streams", overview.streams),
        ("storage", overview.storage_by_field),
        ("history", lambda snapshot: run_history.history(snapshot, list_checkpoints(snapshot.storage))),
    ):
        contents.answer(name, {}, lambda compute=compute: compute(snapshot))
    listed, rows = EpisodeList(snapshot.episodes), list[dict[str, Any]]()
    first = listed.page(n=1)
    while len(rows) < min(MAX_ROWS, first["n_episodes"]):
        rows += listed.page(start=len(rows), n=MAX_ROWS - len(rows))["rows"]
    contents.table({"columns": first["columns"], "n_episodes": first["n_episodes"], "rows": rows})
    return len(rows)


@dataclass
class _Contents:
    """What the page will hold, within its limit.

    Attributes:
        max_bytes: The limit.
        secrets: Texts that it must not hold.
        n_bytes: Bytes so far, about.
        n_frames_left_out: Frames that did not fit.
    """

    max_bytes: int
    secrets: tuple[str, ...]
    n_bytes: int = _SPARED
    n_frames_left_out: int = 0
    data: dict[str, Any] = field(default_factory=lambda: {"answers": {}, "frames": {}, "table": {}})

    def __post_init__(self) -> None:
        self.n_bytes += len(exported_page({}))
        self._check()

    def _check(self) -> None:
        if self.n_bytes > self.max_bytes:
            raise DataError(
                f"max_bytes: the overview and the table take {self.n_bytes:,} bytes, but the page may take"
                f" {self.max_bytes:,}"
            )

    def answer(self, name: str, parameters: dict[str, Any], compute: Any) -> None:
        answer = self._answered(compute)
        self.data["answers"][_key(name, parameters)] = answer
        self.n_bytes += len(to_json(answer))

    def _answered(self, compute: Any) -> Any:
        """An answer, or the error where it would be."""
        try:
            return plain(compute())
        except TrajstoreError as error:
            return {"error": redacted(str(error), self.secrets), "kind": "damaged"}

    def table(self, table: dict[str, Any]) -> None:
        self.data["table"] = plain(table)
        self.n_bytes += len(to_json(table))
        self._check()

    def add_episode(self, moment: Moment, key: EpisodeKey) -> bool:
        """Add the series and frames of an episode; returns whether the series fit."""
        named = {"stream": key.stream, "episode": key.episode}
        page = EpisodePage(moment, key)
        facts = page.facts()
        answers = {_key("episode", named): plain(facts)}
        for described, name, method in (
            *((f, "series", page.series) for f in facts["fields"] if not f["is_frames"]),
            *((c, "column", page.column) for c in facts["columns"]),
        ):
            answers[_key(name, named | {"path": described["path"]})] = self._answered(
                lambda path=described["path"], method=method: method(path, 0, None, POINTS)
            )
        n_bytes = len(to_json(answers))
        if self.n_bytes + n_bytes > self.max_bytes:
            return False
        self.data["answers"].update(answers)
        self.n_bytes += n_bytes
        for described in facts["fields"]:
            if described["is_frames"] and described["n"]:
                self._add_frames(page, named, described["path"], described["n"])
        return True

    def _add_frames(self, page: EpisodePage, named: dict[str, Any], path: str, n: int) -> None:
        kept = self.data["frames"].setdefault(_key("frame", named | {"path": path}), [])
        for step, address in self._frames(page, path, _spread(n)):
            if self.n_bytes + len(address) > self.max_bytes:
                self.n_frames_left_out += 1
                continue
            kept.append([step, address])
            self.n_bytes += len(address)

    def _frames(self, page: EpisodePage, path: str, steps: Array) -> Iterator[tuple[int, str]]:
        for step in steps.tolist():
            try:
                image = page.frame(path, step)
            except TrajstoreError:
                continue  # the page says that it has no frame of this step
            yield step, "data:image/png;base64," + base64.b64encode(image.data).decode()


def _spread(n: int) -> Array:
    steps: Array = np.unique(np.linspace(0, n - 1, min(n, N_FRAMES)).round().astype(np.int64))
    return steps


def _key(name: str, parameters: dict[str, Any]) -> str:
    """As the page's scripts name a question."""
    return f"{name}?{urlencode(parameters)}"


def _note(url: str, moment: Moment, rows: int, included: int, chosen: int, contents: _Contents) -> str:
    n = len(moment.snapshot.episodes)
    parts = [
        f"Written by trajstore from {url}.",
        f"The table lists {rows:,} of {n:,} episodes. {included:,} have series, shortened to {POINTS} parts, and at"
        f" most {N_FRAMES} frames of each field.",
    ]
    if included < chosen:
        parts.append(f"{chosen - included:,} chosen episodes did not fit in {contents.max_bytes:,} bytes.")
    if contents.n_frames_left_out:
        parts.append(f"{contents.n_frames_left_out:,} frames did not fit.")
    return " ".join(parts)
