"""Checks that the spans of every episode follow each other, in whichever streams they are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from trajstore.format.spans import End
from trajstore.schema import Array
from trajstore.store.verify.inspection import CheckedStream, Inspection
from trajstore.store.verify.spans import span_name


def check_episodes(inspection: Inspection, shown_as: str, streams: Sequence[CheckedStream]) -> None:
    """Check the episodes that readers show as those of one stream.

    Args:
        inspection: Takes the problems.
        shown_as: Id of the stream that handles of these episodes name.
        streams: The streams that hold their spans.
    """
    if any(stream.spans is None for stream in streams):
        return  # already reported
    table = _episode_spans(streams)
    problems = [
        (f"{stream.name}, {span_name(stream.spans[0], table['span'][i])}", what)
        # If the original stream is gone, the streams that replace it may hold only a part of it.
        for i, what in _episode_faults(table, is_whole=shown_as in inspection.records)
        if (stream := streams[table["member"][i]]).spans is not None
    ]
    inspection.problems_of_one_kind(problems, f"stream '{shown_as}'")
    inspection.report.counts["episodes"] += len(np.unique(table["episode"]))


def _episode_spans(streams: Sequence[CheckedStream]) -> dict[str, Array]:
    """The spans that readers show, sorted by episode and time; ``member`` is an index into ``streams``."""
    columns: dict[str, list[Array]] = {}
    for member, stream in enumerate(streams):
        assert stream.spans is not None
        ints = stream.spans[0]
        is_shown = np.ones(len(ints), bool)
        for start, stop in stream.hidden:
            is_shown &= (ints[:, 3] < start) | (ints[:, 3] >= stop)
        kept = np.flatnonzero(is_shown)
        found = {name: ints[kept, i] for i, name in ((0, "episode"), (1, "env"), (2, "t_start"), (5, "end"))}
        found |= {"has_final": ints[kept, 6], "n_rows": ints[kept, 4] - ints[kept, 3]}
        found |= {"span": kept, "member": np.full(len(kept), member)}
        for name, column in found.items():
            columns.setdefault(name, []).append(column)
    joined = {name: np.concatenate(blocks) for name, blocks in columns.items()}
    order = np.lexsort((np.arange(len(joined["span"])), joined["t_start"], joined["episode"]))
    return {name: column[order] for name, column in joined.items()}


def _episode_faults(spans: Mapping[str, Array], *, is_whole: bool) -> Iterator[tuple[int, str]]:
    """Spans that do not follow the previous one; ``is_whole``: every episode must begin with step 0."""
    t, env, stop = spans["t_start"], spans["env"], spans["t_start"] + spans["n_rows"]
    has_ended = (spans["end"] != End.OPEN) | (spans["has_final"] != 0)
    follows = np.zeros(len(t), bool)
    follows[1:] = np.diff(spans["episode"]) == 0
    for i in np.flatnonzero(~follows & (t != 0)).tolist() if is_whole else ():
        yield i, f"begins at step {t[i]}, but the steps before it are in no span"
    for i in np.flatnonzero(follows & (t != np.roll(stop, 1))).tolist():
        yield i, f"begins at step {t[i]}, the previous span ends at step {stop[i - 1]}"
    for i in np.flatnonzero(follows & np.roll(has_ended, 1)).tolist():
        yield i, "continues an episode that has ended"
    for i in np.flatnonzero(follows & (env != np.roll(env, 1))).tolist():
        yield i, f"is of environment {env[i]}, the previous span of {env[i - 1]}"
