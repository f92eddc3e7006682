"""The HTML of a buffer. Making it neither draws, nor commits, nor takes errors that wait for the next call."""

from __future__ import annotations

import dataclasses

from trajstore.html_blocks import Section, count, facts, representation
from trajstore.replay.options import ReplayOptions
from trajstore.replay.session import Session
from trajstore.store.checkpoints import list_checkpoints


class BufferHtml:
    """The part of a `ReplayBuffer` that notebooks show."""

    _session: Session

    def _repr_html_(self) -> str:
        session = self._session
        return representation(
            "ReplayBuffer", session.store.url, lambda: _summary(session), [
                lambda: _contents(session),
                lambda: _fields(session),
                lambda: _options(session),
                lambda: _checkpoints(session),
            ],
        )  # fmt: skip


def _summary(session: Session) -> str:
    index = session.reader.assembler.index
    state = "closed" if session.is_closed else "open"
    return f"{state}, {count(index.n_steps, 'step')} in {count(index.n_episodes, 'episode')}"


def _contents(session: Session) -> Section:
    assembler = session.reader.assembler
    with assembler.lock:
        n_steps, n_episodes = assembler.index.n_steps, assembler.index.n_episodes
        n_waiting = len(assembler.uncommitted_episodes)
    evicted = {cause: counts.get("steps", 0) for cause, counts in session.eviction.counts.items()}
    waiting = f"{count(n_waiting, 'episode')}, as a whole or in part" if n_waiting else None
    pairs = [
        ("steps that can be sampled", f"{n_steps:,}"),
        ("episodes", f"{n_episodes:,}"),
        ("not committed yet", waiting),
        ("windows drawn", f"{session.drawing.n_sampled:,}"),
        ("evicted steps", ", ".join(f"{n:,} by {cause}" for cause, n in evicted.items() if n) or None),
        ("policy version", session.versions.current),
        ("stream", session.writer.stream),
        ("rank", f"{session.group.rank} of {session.group.size}" if session.group.size > 1 else None),
        ("world", session.group.id),
    ]
    return Section("Contents", count(n_steps, "step"), facts(pairs), is_open=True)


def _fields(session: Session) -> Section:
    if session.schema is None:
        return Section("Fields", "not known before the first data")
    return session.schema.fields_section()


def _options(session: Session) -> Section:
    """The options that differ from the defaults."""
    options, defaults = session.options, ReplayOptions()
    names = [option.name for option in dataclasses.fields(options)]
    changed = [name for name in names if getattr(options, name) != getattr(defaults, name)]
    capacity = options.capacity
    limit = "no limit" if capacity is None else f"capacity {capacity:,}" if isinstance(capacity, int) else "limited"
    return Section("Options", limit, facts((name, getattr(options, name)) for name in changed))


def _checkpoints(session: Session) -> Section:
    found = list_checkpoints(session.storage)
    names = ", ".join(c.name for c in found[-5:][::-1])
    return Section("Checkpoints", f"{len(found):,}{'; newest: ' if found else ''}{names}")
