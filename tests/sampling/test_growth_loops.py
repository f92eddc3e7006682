"""Appended rows that one compiled loop takes up are shown as those that array operations take up, whatever came."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from trajstore import Field, Reader, Schema, Windows
from trajstore.sampling.batches.batch_assembler import BatchAssembler
from trajstore.sampling.live.live_episodes import LiveEpisodes
from trajstore.sampling.live.live_pages import LivePages

KINDS = [
    Windows(1),
    Windows(3),
    Windows(2, stride=2, burn_in=1, strict_context=True),
    Windows(3, boundary="short"),
    Windows(3, boundary="pad_right"),
    Windows(3, stride=2, boundary="pad_both"),
    Windows(2, n_step=2),
    Windows(2, boundary="cross"),
    Windows(2, weight="episode"),
]
SCHEMA = Schema({"obs": Field("float32", (3,), final=True), "flag": Field("bool"), "reward": Field("float64")})

ACTIONS = st.one_of(
    st.tuples(st.just("one"), st.integers(0, 3), st.sampled_from(["", "", "", "terminated", "truncated"])),
    st.tuples(st.just("many"), st.sets(st.integers(0, 6), min_size=1), st.integers(0, 6)),
    st.tuples(st.just("rollout"), st.integers(1, 5), st.integers(1, 4)),
    st.tuples(st.just("episode"), st.integers(1, 9)),
    st.tuples(st.just("end"), st.integers(0, 3)),
    st.tuples(st.just("abort"), st.integers(0, 3)),
    st.tuples(st.just("amend"), st.integers(0, 3)),
    st.tuples(st.just("commit")),
    st.tuples(st.just("look")),
    st.tuples(st.just("evict"), st.integers(0, 3), st.integers(1, 4)),
)


class Session:
    """A writer with a reader that follows it."""

    def __init__(self, *, compiled: bool) -> None:
        store = trajstore.create(f"memory://growth-{np.random.default_rng().integers(1 << 60)}", SCHEMA)
        self.writer = store.writer("w", commit_seconds=None)
        self.reader = Reader(store, writer=self.writer, cache_bytes="8MB", compiled=compiled)
        self.n = 0

    def values(self, *lead: int) -> dict[str, Any]:
        """Values that never occur again."""
        count = int(np.prod(lead))
        number = (self.n + np.arange(count)).reshape(lead)
        self.n += count
        obs = np.stack([number, number * 2, -number], -1).astype(np.float32)
        return {"obs": obs, "flag": number % 2 == 0, "reward": number / 8}

    def act(self, action: str, *arguments: Any) -> None:
        writer = self.writer
        if action == "one":
            env, end = arguments
            writer.append(self.values(), env=env, **({end: True, "final": self.final()} if end else {}))
        elif action == "many":
            envs, ending = sorted(arguments[0]), arguments[1]
            flags = {"terminated": np.array([env == ending for env in envs])}
            writer.append(self.values(len(envs)), envs=envs, autoreset="disabled", **flags)
        elif action == "rollout":
            ends = np.arange(arguments[0] * arguments[1]).reshape(arguments) % 5 == 4
            writer.append_rollout(self.values(*arguments), truncated=ends)
        elif action == "episode":
            writer.append_episode(self.values(arguments[0]), env=9, terminated=True)
        elif action == "commit":
            writer.commit()
        elif action == "look":
            self.shown()
        elif action == "evict":
            self.evict(*arguments)
        else:
            self.act_on_open(action, *arguments)

    def final(self) -> dict[str, Any]:
        return {"obs": self.values()["obs"]}

    def act_on_open(self, action: str, env: int) -> None:
        try:
            if action == "end":
                self.writer.end_episode(env, truncated=True, final=self.final())
            elif action == "abort":
                self.writer.abort_episode(env)
            else:
                self.writer.amend(self.values(), env=env)
        except (trajstore.EpisodeNotFoundError, trajstore.StepPlacedError):
            pass  # both sessions refuse the same

    def evict(self, entry: int, n: int) -> None:
        assembler: BatchAssembler = self.reader.assembler
        with assembler.lock:
            assembler.publish()
            index = assembler.index
            if index.first + entry < index.n:
                at = np.array([index.first + entry])
                handle = index.stream.host[at].astype(np.int64), index.episode.host[at].copy()
                assembler.evict(*handle, index.t_base.host[at] + n)

    def shown(self) -> Any:
        """Everything that can be drawn: the index, the number of windows, and the values of all steps."""
        assembler = self.reader.assembler
        with assembler.lock:
            assembler.publish()
            if not assembler.has_cache or not assembler.index.n_steps:
                return None
            index = assembler.index
            columns = [index.episode, index.t_base, index.flags, index.env, index.step_sums, index.logical]
            facts = [column.host[index.first :].tolist() for column in columns]
            sums = [assembler.kind(windows).starts.sums.tolist() for windows in KINDS]
        steps = list(self.reader.read_all_in_order(block_steps=64))
        values = [{name: b[name].tolist() for name in ("obs", "flag", "reward", "index")} for b in steps]
        return facts, sums, values


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=st.lists(ACTIONS, max_size=25), page_rows=st.sampled_from([1, 2, 64]))
def test_compiled_loops_show_what_array_operations_show(
    script: list[tuple[Any, ...]], page_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore.sampling.live.live_pages._MAX_PAGE_ROWS", page_rows)
    sessions = [Session(compiled=compiled) for compiled in (True, False)]
    for action in script:
        for session in sessions:
            session.act(*action)
        if action[0] == "look":
            assert sessions[0].shown() == sessions[1].shown()
    assert sessions[0].shown() == sessions[1].shown()
    for session in sessions:
        session.writer.close()


def test_appended_rows_are_taken_up_by_the_compiled_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    session = Session(compiled=True)
    session.act("one", 0, "")
    session.shown()
    slow: list[Any] = []
    take = LiveEpisodes.take
    monkeypatch.setattr(LiveEpisodes, "take", lambda self, staging: slow.append(staging) or take(self, staging))
    for action in [("one", 0, ""), ("many", {1, 2, 3}, 2), ("one", 0, "terminated"), ("rollout", 3, 2), ("look",)]:
        session.act(*action)
        session.shown()
    assert not slow
    session.writer.close()


def test_nothing_is_locked_if_nothing_was_appended(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(compiled=True)
    session.act("one", 0, "")
    session.act("one", 0, "")
    session.shown()
    locked: list[Any] = []
    monkeypatch.setattr(type(session.writer), "lock_staging", lambda *a: locked.append(a) or False)
    session.reader.sample(2, Windows(1))
    assert not locked
    monkeypatch.undo()
    session.writer.amend(session.values(), env=0)
    assert session.reader.at(np.array([[0, 0, 1]]), Windows(1))["reward"].tolist() == [[2 / 8]]
    session.writer.commit()
    session.act("one", 0, "")
    assert session.reader.n_windows(Windows(1)) == 3
    session.writer.close()


def test_rows_without_free_pages_are_not_taken_up_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(pages: LivePages, _: int) -> None:
        pages.page_rows, pages.free, pages.n_free = 2, np.arange(3), 3

    monkeypatch.setattr(LivePages, "set_rows", few)
    monkeypatch.setattr(LivePages, "is_half_taken", False)  # else a commit in the background would free pages
    session = Session(compiled=True)
    for _ in range(2):
        session.act("many", {0, 1}, 9)
    session.shown()
    session.act("many", {0, 1}, 9)
    assembler = session.reader.assembler
    with assembler.lock:
        assembler.publish(may_commit=False)
        assert assembler.index.n_steps == 4  # two pages are needed, and one is free
    assert session.reader.n_windows(Windows(1)) == 6
    session.writer.close()
