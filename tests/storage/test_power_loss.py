"""A loss of power at any moment: what was promised is there, and nothing is torn.

Workloads run on a real directory while `tests.support.power_loss` records what they do to files. Then the power is
lost after each recorded operation: states that a file system may be left in are opened and compared with what had
been promised until then. ``TRAJSTORE_POWER_STATES`` sets the number of states, see `tests.support.power_loss`, and
``--log-cli-level=INFO`` shows how many there were.

To add a workload, write a function that takes a `Ledger`, and decorate it with `workload`. It appends by
`Ledger.append`, and does each thing that ends with a promise inside `Ledger.promising`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import trajstore
from tests.support.power_loss import Crash, FileSystem, Image, Operation, Recorder, choose, crashes, n_states
from trajstore import EpisodeKey, Field, Priorities, ReplayBuffer, Schema, Store, StoreNotFoundError, Writer
from trajstore.storage import ANY, LocalStorage, Put, written_files
from trajstore.storage.written_files import WrittenFiles
from trajstore.store.verify import verify

_log = logging.getLogger(__name__)

SCHEMA = Schema(
    {
        "observation": Field("float32", (2,), final=True, chunk_rows=4),
        "action": Field("int64", chunk_rows=2, shard_rows=8),
        "reward": Field("float32", chunk_rows=4),
    }
)
COLUMNS = ("priority", "advantage")
BUFFER: dict[str, Any] = {
    "schema": SCHEMA,
    "commit_seconds": None,
    "grace_s": 0.0,
    "buffer_bytes": "256KB",
    "cache_bytes": "8MB",
    "seed": 3,
}
N_DEEP = 40  # states of each workload, at least, that are also verified, walked by zarr, resumed and written to
N_PLANTED = 200  # states that a planted bug is looked for in

Work = Callable[["Ledger"], None]
Bug = Callable[[Recorder, pytest.MonkeyPatch], None]

# ---- what is promised -------------------------------------------------------------------------------------
# Steps are numbered from 1 in the order of their appends, and all values of a step follow from its number.


@dataclass(frozen=True)
class Shown:
    """An episode: the numbers of its steps, and how it ended."""

    steps: tuple[int, ...]
    end: str


Episodes = Mapping[EpisodeKey, Shown]


@dataclass(frozen=True)
class Saved:
    """A checkpoint: what it shows, and the steps and weights of the first batch after it."""

    episodes: Episodes
    wanted: frozenset[int]
    following: tuple[list[float], ...]


@dataclass(frozen=True)
class Version:
    """What a reader sees when some promise was kept.

    Attributes:
        is_there: Whether there is a store.
        episodes: With all steps that were committed.
        wanted: The steps that are not evicted.
        columns: By name, values by step.
        checkpoints: By name.
    """

    is_there: bool = False
    episodes: Episodes = field(default_factory=dict)
    wanted: frozenset[int] = frozenset()
    columns: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    checkpoints: Mapping[str, Saved] = field(default_factory=dict)


class Ledger:
    """Appends for a workload, and writes down what is promised when."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.url = str(recorder.base / "store")
        self.versions = [Version()]
        self.ending = contextlib.ExitStack()  # closed after the recording: what a crashed session left open
        self.capacity = 1 << 40
        self.columns: dict[str, dict[int, float]] = {}
        self.checkpoints: dict[str, Saved] = {}
        self._n = 0
        self._abandoned: set[int] = set()
        self._episodes: dict[EpisodeKey, Shown] = {}

    def append(self, sink: Writer | ReplayBuffer, envs: Sequence[int], ended: Iterable[int] = ()) -> None:
        """Append one step of each environment; the episodes of some of them end with it."""
        steps = np.arange(self._n + 1, self._n + 1 + len(envs))
        self._n += len(envs)
        is_last = np.isin(envs, list(ended))
        final = {"observation": observations(-steps)}
        handles: Any = sink.append(values(steps), envs=list(envs), terminated=is_last, final=final)
        for step, episode, last in zip(steps.tolist(), handles.episode.tolist(), is_last, strict=True):
            key = EpisodeKey(handles.stream, episode)
            before = self._episodes[key].steps if key in self._episodes else ()
            self._episodes[key] = Shown((*before, step), "terminated" if last else "open")

    def cut(self) -> None:
        """The writer is closed or declared dead: what is open now reads as cut."""
        self._episodes = cut(self._episodes)

    def save(self, buffer: ReplayBuffer, name: str, **options: Any) -> None:
        """Save a checkpoint, and look at the batch that comes after it."""
        buffer.save_checkpoint(name, wait=True, **options)
        own = {key: without(shown, self._abandoned) for key, shown in cut(self._episodes).items()}
        shown = {key: shown for key, shown in own.items() if shown.steps}
        saved = Saved(shown, self.wanted - self._abandoned, next_batch(buffer))
        self.checkpoints = {**self.checkpoints, name: saved}

    def abandon(self, name: str) -> None:
        """Another session resumes this checkpoint: open episodes are cut, and later steps are not its own."""
        kept = {step for shown in self.checkpoints[name].episodes.values() for step in shown.steps}
        self._abandoned = {*range(1, self._n + 1)} - kept
        self.cut()

    def set_column(self, name: str, steps: list[int], known: list[float]) -> None:
        self.columns[name] = {**self.columns.get(name, {}), **dict(zip(steps, known, strict=True))}

    @property
    def wanted(self) -> frozenset[int]:
        """The newest steps of the session, and those that others left in the same streams."""
        own = [step for step in range(1, self._n + 1) if step not in self._abandoned]
        newest = {*own[-self.capacity :]}
        streams = {key.stream for key, shown in self._episodes.items() if newest.intersection(shown.steps)}
        beside = {step for key, shown in self._episodes.items() if key.stream in streams for step in shown.steps}
        return frozenset(newest | (beside & self._abandoned))

    @contextlib.contextmanager
    def promising(self) -> Iterator[None]:
        """When the block has ended, all that was done is promised."""
        self.recorder.mark("begun", len(self.versions))
        yield
        columns = {name: dict(known) for name, known in self.columns.items()}
        version = Version(True, dict(self._episodes), self.wanted, columns, dict(self.checkpoints))
        self.versions.append(version)
        self.recorder.mark("done", len(self.versions) - 1)


def without(shown: Shown, steps: set[int]) -> Shown:
    return replace(shown, steps=tuple(step for step in shown.steps if step not in steps))


def cut(episodes: Episodes) -> dict[EpisodeKey, Shown]:
    return {key: replace(e, end="cut") if e.end == "open" else e for key, e in episodes.items()}


def next_batch(buffer: ReplayBuffer) -> tuple[list[float], ...]:
    """The steps that come next, and what they weigh: both depend on all priorities."""
    batch = buffer.sample(16)
    weights = batch["priority"]["weight"] if "priority" in batch else torch.ones(16)
    return batch["action"].flatten().tolist(), weights.flatten().tolist()


def observations(steps: Any) -> Any:
    return np.stack([steps, steps + 0.5], axis=-1).astype(np.float32)


def values(steps: Any) -> dict[str, Any]:
    return {"observation": observations(steps), "action": steps, "reward": (steps % 7).astype(np.float32)}


# ---- what is seen -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What a reader finds, or the error it got."""

    is_there: bool = False
    episodes: Episodes = field(default_factory=dict)
    columns: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    checkpoints: Mapping[str, Episodes] = field(default_factory=dict)
    error: str = ""


def look(url: str) -> Seen:
    """Read all that a store shows; errors are what is looked for, so they are caught."""
    try:
        return _look(url)
    except StoreNotFoundError:
        return Seen()
    except Exception as error:  # whatever a reader gets, it counts
        return Seen(error=f"{type(error).__name__}: {error}")


def _look(url: str) -> Seen:
    store = trajstore.open(url, fsync=False)
    found = list(read(store))
    episodes = {key: shown for key, shown, _ in found}
    at = {c.name: trajstore.open(url, at=c.id, fsync=False) for c in store.checkpoints}
    saved = {name: {key: shown for key, shown, _ in read(past)} for name, past in at.items()}
    columns = {name: known for name in COLUMNS if (known := read_column(store, name, found))}
    return Seen(True, episodes, columns, saved)


Read = tuple[EpisodeKey, Shown, list[int]]


def read(store: Store) -> Iterator[Read]:
    """Every episode, abandoned ones too, checked against the numbers of its steps, and its rows in its stream."""
    everything = store.snapshot.with_abandoned()
    table = everything.episodes
    assert len(store.episodes) <= len(table)
    about = zip(table["stream"], table["episode"], table["end"], table["has_final"], strict=True)
    for i, (stream, episode, end, has_final) in enumerate(about):
        found = everything.read_episode(i)
        steps = found["action"]
        expected = values(steps)
        if has_final:
            expected["observation"] = np.concatenate([expected["observation"], observations(-steps[-1:])])
        for name, known in expected.items():
            assert np.array_equal(found[name], known), f"{name} of episode {episode}: {found[name]}, not {known}"
        rows = [row for span in table.spans(i) for row in range(span.row_start, span.row_stop)]
        yield EpisodeKey(str(stream), int(episode)), Shown(tuple(steps.tolist()), str(end)), rows


def read_column(store: Store, name: str, episodes: Iterable[Read]) -> dict[int, float]:
    """The values of a column by step, as far as it reaches."""
    stored = store.snapshot.columns.read(name)
    found: dict[int, float] = {}
    for key, shown, rows in episodes if stored else ():
        first, known = stored.get(key.stream, (0, np.zeros(0)))
        for step, row in zip(shown.steps, rows, strict=False):
            if first <= row < first + len(known):
                found[step] = float(known[row - first])
    return found


# ---- one against the other --------------------------------------------------------------------------------


def fault(seen: Seen, versions: Sequence[Version], done: int, begun: int) -> str:
    """What is wrong, or nothing, if promises up to ``done`` were given and work up to ``begun`` had started."""
    if seen.error:
        return seen.error
    if not seen.is_there:
        return "the store is gone" if versions[done].is_there else ""
    possible = versions[done : begun + 1]
    last = possible[-1]
    if not any(shows(seen.episodes, version.episodes, last) for version in possible):
        return f"no commit from {done} to {begun} has these episodes: {dict(seen.episodes)}"
    if not any(has_columns(seen, version) for version in possible):
        return f"no commit from {done} to {begun} has these columns: {seen.columns}"
    return _checkpoint_fault(seen, possible)


def shows(seen: Episodes, expected: Episodes, last: Version) -> bool:
    """Whether these are the expected episodes, less steps that the last version no longer wants."""
    if seen.keys() - expected.keys():
        return False
    return all(_is_shown(seen.get(key), known, last, key) for key, known in expected.items())


def _is_shown(seen: Shown | None, known: Shown, last: Version, key: EpisodeKey) -> bool:
    wanted = last.wanted.intersection(known.steps)
    if seen is None:
        return not wanted
    end = last.episodes[key].end if key in last.episodes else known.end
    is_suffix = known.steps[len(known.steps) - len(seen.steps) :] == seen.steps
    return is_suffix and wanted <= {*seen.steps} and seen.end in (known.end, end)


def has_columns(seen: Seen, version: Version) -> bool:
    there = {step for shown in seen.episodes.values() for step in shown.steps}
    return all(
        seen.columns.get(name, {}).get(step) == value
        for name, known in version.columns.items()
        for step, value in known.items()
        if step in there & version.wanted
    )


def _checkpoint_fault(seen: Seen, possible: Sequence[Version]) -> str:
    promised = set.intersection(*({*version.checkpoints} for version in possible))
    known = {name: saved for version in possible for name, saved in version.checkpoints.items()}
    if lost := promised - seen.checkpoints.keys():
        return f"lost checkpoints: {lost}"
    if strange := seen.checkpoints.keys() - known.keys():
        return f"checkpoints that were never begun, or are removed: {strange}"
    for name, episodes in seen.checkpoints.items():
        if not shows(episodes, known[name].episodes, Version(wanted=known[name].wanted)):
            return f"checkpoint {name} shows {dict(episodes)}, not {known[name]}"
    return ""


# ---- going on after a crash -------------------------------------------------------------------------------


def deep_fault(url: str, seen: Seen, versions: Sequence[Version]) -> str:
    """What is wrong when a state is verified, walked by zarr, resumed and written to; changes the store."""
    try:
        if seen.is_there:
            _verify(url)
            _walk(url)
            known = {name: saved for version in versions for name, saved in version.checkpoints.items()}
            for checkpoint in trajstore.open(url, at="latest", fsync=False).checkpoints if seen.checkpoints else ():
                _resume(url, checkpoint.id, known[checkpoint.name])
        _go_on(url, look(url))
    except Exception as error:  # whatever it is, it counts
        return "".join(traceback.format_exception(error)[-2:])
    return ""


def _verify(url: str) -> None:
    assert not verify(url).problems


def _walk(url: str) -> None:
    """All arrays can be found, and those of streams read, by plain zarr, without a warning."""
    with warnings.catch_warnings(action="error"):
        for path, node in zarr.open_group(url, mode="r", zarr_format=3).members(max_depth=None):
            if isinstance(node, zarr.Array) and path.startswith("streams/"):
                node[...]


def _resume(url: str, checkpoint: str, saved: Saved) -> None:
    with ReplayBuffer.resume(url, checkpoint, fsync=False) as buffer:
        assert next_batch(buffer) == saved.following
        found = {int(step) for block in buffer.read_all_in_order() for step in block["action"].flatten()}
        assert found == saved.wanted
    seen = look(url)
    assert not seen.error, seen.error
    assert saved.wanted <= {step for shown in seen.episodes.values() for step in shown.steps}


def _go_on(url: str, before: Seen) -> None:
    """A new session can write to what is left, and takes nothing away."""
    writer = trajstore.create(url, SCHEMA, exist_ok=True, fsync=False).writer("after", commit_seconds=None)
    steps = np.arange(1000, 1006)
    key = writer.append_episode(values(steps), truncated=True)
    writer.commit()
    expected = {**before.episodes, key: Shown(tuple(steps.tolist()), "truncated")}
    assert look(url).episodes == expected
    writer.close()
    assert look(url).episodes == expected


# ---- exploring --------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a workload was tried with, and what was wrong."""

    n_states: int = 0
    n_points: int = 0
    n_deep: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)
    states: set[int] = field(default_factory=set)  # those with a violation

    def __str__(self) -> str:
        return (
            f"{self.n_states} distinct states at {self.n_points} points, {self.n_deep} continued,"
            f" {len(self.states)} with violations, {self.seconds:.1f} s"
        )


class Explorer:
    """Tries the states that a recording may end in."""

    def __init__(self, ledger: Ledger, room: Path) -> None:
        self._log, self._versions = ledger.recorder.log, ledger.versions
        self._image, self._copy = Image(room / "image"), room / "copy"
        self._seen: dict[int, Seen] = {}

    def run(self, limit: int, n_deep: int, *, ends_at_violation: bool = False) -> Outcome:
        started, outcome = time.monotonic(), Outcome()
        chosen, n_random = choose(self._log, limit)
        deep = set(sorted(chosen)[:: max(1, len(chosen) // n_deep)]) if n_deep else set()
        points = set()
        for crash in crashes(self._log, n_random, chosen):
            points.add(crash.at)
            self._try(crash, crash.state in deep and crash.state not in self._seen, outcome)
            if outcome.violations and ends_at_violation:
                break
        outcome.n_states, outcome.n_points = len(self._seen), len(points)
        outcome.seconds = time.monotonic() - started
        return outcome

    def _try(self, crash: Crash, is_deep: bool, outcome: Outcome) -> None:
        seen = self._look(crash)
        wrong = fault(seen, self._versions, crash.marks.get("done", 0), crash.marks.get("begun", 0))
        if is_deep and not wrong:
            outcome.n_deep += 1
            wrong = self._deep_fault(crash, seen)
        if wrong:
            outcome.states.add(crash.state)
            outcome.violations.append(f"after entry {crash.at} ({self._log[crash.at]}), {crash.marks}: {wrong}")

    def _look(self, crash: Crash) -> Seen:
        if crash.state not in self._seen:
            self._image.show(crash.tree())
            self._seen[crash.state] = look(str(self._image.base / "store"))
        return self._seen[crash.state]

    def _deep_fault(self, crash: Crash, seen: Seen) -> str:
        Image(self._copy).show(crash.tree())
        try:
            return deep_fault(str(self._copy / "store"), seen, self._versions)
        finally:
            shutil.rmtree(self._copy)


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where there is one."""
    memory = Path("/dev/shm")
    made = memory / f"trajstore-power-{tmp_path.name}-{time.time_ns()}" if memory.is_dir() else tmp_path / "room"
    made.mkdir()
    yield made
    shutil.rmtree(made)


def recorded(room: Path, work: Work, bug: Bug | None = None) -> Ledger:
    """Run a workload, with a bug planted in the library if one is given."""
    base = room / "recorded"
    base.mkdir()
    ledger = Ledger(Recorder(base))
    with ledger.ending, pytest.MonkeyPatch.context() as patch, ledger.recorder.recording():
        if bug is not None:
            bug(ledger.recorder, patch)
        work(ledger)
    return ledger


# ---- workloads --------------------------------------------------------------------------------------------

WORKLOADS: dict[str, Work] = {}


def workload(function: Work) -> Work:
    """Have this tried with a loss of power at every moment."""
    WORKLOADS[function.__name__] = function
    return function


@workload
def writing(ledger: Ledger) -> None:
    """Several environments, several chunks a commit, tails that are rewritten, sealing."""
    with ledger.promising():
        store = trajstore.create(ledger.url, SCHEMA)
    writer = store.writer("first", commit_seconds=None)
    for turn in range(4):
        with ledger.promising():
            for t in range(2 + turn):
                ledger.append(writer, [0, 1, 2], ended=[turn % 3] if t == 1 else [])
            writer.commit()
    with ledger.promising():
        ledger.append(writer, [1])
        ledger.cut()
        writer.close()


def set_priorities(buffer: ReplayBuffer, factor: int) -> None:
    for block in buffer.read_all_in_order():
        buffer.update_priorities(block["index"], new_values(block["action"].flatten(), factor))


def set_values(ledger: Ledger, buffer: ReplayBuffer, name: str, factor: int, *, every: int = 1) -> None:
    """Write other values of a column: for all steps, or for one out of several."""
    for block in buffer.read_all_in_order():
        steps = block["action"].flatten()
        chosen = steps % every == 0
        new = new_values(steps[chosen], factor)
        buffer.write_column(name, block["index"][chosen], new)
        ledger.set_column(name, steps[chosen].tolist(), new.tolist())


def put_values(ledger: Ledger, writer: Writer, name: str, target: str, factor: int) -> None:
    """A new generation of a column by another writer, which puts values by row."""
    found = [
        pair for _, shown, rows in read(trajstore.open(ledger.url)) for pair in zip(rows, shown.steps, strict=False)
    ]
    rows, steps = (list(column) for column in zip(*found, strict=True))
    known = new_values(torch.tensor(steps), factor).numpy()
    by_row = np.zeros(max(rows) + 1, np.float32)
    by_row[rows] = known
    writer.put_column(name, target, by_row)
    writer.commit()
    ledger.set_column(name, steps, known.tolist())


def new_values(steps: torch.Tensor, factor: int) -> torch.Tensor:
    return (steps * factor % 13 + 1).float()


def fill(ledger: Ledger, buffer: ReplayBuffer, n: int, *, envs: Sequence[int] = (0, 1), last: int = -1) -> None:
    for t in range(n):
        ledger.append(buffer, envs, ended=envs if t == last else ())


@workload
def checkpoints_with_priorities(ledger: Ledger) -> None:
    """A buffer with priorities: flushed, saved, saved again, and the first checkpoint pruned."""
    with ledger.promising():
        buffer = ReplayBuffer(ledger.url, priorities=Priorities(alpha=0.6), **BUFFER)
    with ledger.promising():
        fill(ledger, buffer, 5, last=3)
        buffer.flush()
    with ledger.promising():
        fill(ledger, buffer, 2)
        set_priorities(buffer, 5)
        ledger.save(buffer, "one")
    with ledger.promising():
        fill(ledger, buffer, 4, last=2)
        buffer.flush()
    with ledger.promising():
        set_priorities(buffer, 7)
        ledger.save(buffer, "two")
    with ledger.promising():
        buffer.prune_checkpoints(1)
        del ledger.checkpoints["one"]
    with ledger.promising():
        ledger.cut()
        buffer.close()


@workload
def eviction_beside_a_checkpoint(ledger: Ledger) -> None:
    """Chunks are deleted as steps are evicted, those that a checkpoint pins when it is pruned."""
    ledger.capacity = 12
    with ledger.promising():
        buffer = ReplayBuffer(ledger.url, capacity=ledger.capacity, **BUFFER)
    for turn in range(5):
        with ledger.promising():
            fill(ledger, buffer, 9, envs=[0], last=7)
            swept(buffer)
        if turn == 2:
            with ledger.promising():
                ledger.save(buffer, "pin")
    with ledger.promising():
        ledger.save(buffer, "later", keep_last=1)
        del ledger.checkpoints["pin"]
    for _ in range(2):
        with ledger.promising():
            fill(ledger, buffer, 9, envs=[0], last=5)
            swept(buffer)
    with ledger.promising():
        ledger.cut()
        buffer.close()


def swept(buffer: ReplayBuffer) -> None:
    """Flush, and give the sweep in the background the time to end."""
    before = buffer.stats()["storage"]["n_sweeps"]
    buffer.flush()
    buffer.stats()  # publishes what is evicted
    deadline = time.monotonic() + 0.5
    while buffer.stats()["storage"]["n_sweeps"] == before and time.monotonic() < deadline:
        time.sleep(0.005)


@workload
def resuming(ledger: Ledger) -> None:
    """A session ends without a close; another one resumes its checkpoint and continues."""
    ledger.capacity = 20
    with ledger.promising():
        first = ReplayBuffer(ledger.url, capacity=ledger.capacity, **BUFFER)
        ledger.ending.callback(_end, first)
    with ledger.promising():
        fill(ledger, first, 10, envs=[0], last=6)
        ledger.save(first, "one")
    with ledger.promising():
        fill(ledger, first, 3, envs=[0])
        first.flush()
    with ledger.promising():
        ledger.abandon("one")
        second = ReplayBuffer.resume(ledger.url, "one")
        fill(ledger, second, 6, envs=[0], last=4)
        second.flush()
    with ledger.promising():
        ledger.save(second, "two")
    with ledger.promising():
        fill(ledger, second, 12, envs=[0], last=4)
        swept(second)
    with ledger.promising():
        ledger.cut()
        second.close()


def _end(buffer: ReplayBuffer) -> None:
    """End the threads of a session that crashed; what it still writes is not recorded."""
    with contextlib.suppress(trajstore.TrajstoreError):
        buffer.close()


@workload
def columns(ledger: Ledger) -> None:
    """A derived column in several generations, with changes of single values between them."""
    with ledger.promising():
        buffer = ReplayBuffer(ledger.url, **BUFFER)
        buffer.add_column("advantage", Field("float32"))
    with ledger.promising():
        fill(ledger, buffer, 9, last=5)
        buffer.flush()
    for factor in (2, 3, 5, 7):
        with ledger.promising():
            set_values(ledger, buffer, "advantage", factor, every=1 if factor % 3 else 6)
            buffer.flush()
    with ledger.promising():
        fill(ledger, buffer, 3)
        set_values(ledger, buffer, "advantage", 11)
        buffer.flush()
    with ledger.promising():
        ledger.cut()
        buffer.close()
    writer = trajstore.open(ledger.url).writer("other", commit_seconds=None)
    for factor in (3, 5, 7):
        with ledger.promising():
            put_values(ledger, writer, "priority", buffer.stream, factor)
    with ledger.promising():
        writer.close()


@workload
def packing(ledger: Ledger) -> None:
    """A finished stream and a checkpoint of it are packed, the original removed, and both again."""
    with ledger.promising():
        buffer = ReplayBuffer(ledger.url, priorities=Priorities(alpha=0.6), **BUFFER)
    for turn in range(3):
        with ledger.promising():
            fill(ledger, buffer, 4, last=turn)
            buffer.flush()
    with ledger.promising():
        set_priorities(buffer, 5)
        ledger.save(buffer, "one")
    with ledger.promising():
        ledger.cut()
        buffer.close()
    for options in ({}, {"chunk_bytes": 16}):
        with ledger.promising():
            assert trajstore.pack(ledger.url, **options).packed
        with ledger.promising():
            assert trajstore.pack(ledger.url, wait=True, grace_s=0).removed
    with ledger.promising():
        ledger.abandon("one")
        again = ReplayBuffer.resume(ledger.url, "one")
        fill(ledger, again, 2)
        again.flush()
    with ledger.promising():
        ledger.cut()
        again.close()


# ---- the promise ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_loss_of_power_at_any_moment_takes_nothing_that_was_promised(room: Path, name: str) -> None:
    ledger = recorded(room, WORKLOADS[name])
    outcome = Explorer(ledger, room).run(n_states(), max(N_DEEP, n_states() // 20))
    _log.info("%s", outcome)
    assert not outcome.violations, f"{outcome}\n" + "\n".join(outcome.violations[:5])
    assert outcome.n_states > 100
    assert outcome.n_deep > 10


@pytest.mark.slow
@pytest.mark.parametrize("work", [writing, columns], ids=lambda found: found.__name__)
def test_nothing_is_lost_when_files_of_a_wave_are_synced_while_others_are_written(
    room: Path, monkeypatch: pytest.MonkeyPatch, work: Work
) -> None:
    monkeypatch.setattr(written_files, "MAX_OPEN", 2)
    outcome = Explorer(recorded(room, work), room).run(n_states() // 2, 0)
    _log.info("%s", outcome)
    assert not outcome.violations, f"{outcome}\n" + "\n".join(outcome.violations[:5])
    assert outcome.n_states > 100


def test_the_workloads_do_what_they_are_named_for(room: Path) -> None:
    ledger = recorded(room, eviction_beside_a_checkpoint)
    operations = [entry for entry in ledger.recorder.log if isinstance(entry, Operation)]
    deleted = [o.path for o in operations if o.name == "unlink" and "/steps/" in o.path]
    assert len(deleted) > 5
    assert any(o.name == "rename" and o.path.startswith("store/checkpoints/") for o in operations)  # one is pruned
    assert any(set(v.checkpoints) == {"pin"} for v in ledger.versions)


# ---- bugs that are planted, to see that they are found ----------------------------------------------------


def chunks_are_not_synced(recorder: Recorder, patch: pytest.MonkeyPatch) -> None:
    put_many = LocalStorage.put_many

    def put_unsynced(self: LocalStorage, puts: Iterable[Put]) -> dict[str, str]:
        wave = list(puts)
        with recorder.skipping(*["files"] * has_chunks(wave)):
            return put_many(self, wave)

    patch.setattr(LocalStorage, "put_many", put_unsynced)


def files_left_for_the_end_of_a_wave_are_not_synced(recorder: Recorder, patch: pytest.MonkeyPatch) -> None:
    take = WrittenFiles.take

    def take_none(self: WrittenFiles) -> list[tuple[str, int]]:
        for _, descriptor in take(self):
            recorder.close(descriptor)
        return []

    patch.setattr(WrittenFiles, "take", take_none)


def files_get_their_names_before_they_are_synced(recorder: Recorder, patch: pytest.MonkeyPatch) -> None:
    put_many, sync = LocalStorage.put_many, LocalStorage._sync_written
    late = list[tuple[str, int]]()

    def put_then_sync(self: LocalStorage, puts: Iterable[Put]) -> dict[str, str]:
        versions = put_many(self, puts)
        for file in late:
            sync(self, file)
        late.clear()
        return versions

    def sync_later(self: LocalStorage, file: tuple[str, int]) -> None:
        if file[0].endswith("zarr.json"):
            sync(self, file)
        else:
            late.append(file)

    patch.setattr(LocalStorage, "put_many", put_then_sync)
    patch.setattr(LocalStorage, "_sync_written", sync_later)


def the_record_is_put_before_the_chunks(recorder: Recorder, patch: pytest.MonkeyPatch) -> None:
    put, put_many, held = LocalStorage.put, LocalStorage.put_many, list[Put]()

    def hold(self: LocalStorage, puts: Iterable[Put]) -> dict[str, str]:
        wave = [made(put) for put in puts]
        if not has_chunks(wave):
            return put_many(self, wave)
        held.extend(wave)
        return {p.key: ANY for p in wave}

    def put_first(self: LocalStorage, key: str, data: bytes, expect: str = ANY) -> str:
        version = put(self, key, data, expect)
        late, held[:] = list(held), []
        put_many(self, late)
        return version

    patch.setattr(LocalStorage, "put_many", hold)
    patch.setattr(LocalStorage, "put", put_first)


def directories_are_not_synced(recorder: Recorder, patch: pytest.MonkeyPatch) -> None:
    recorder.skip("directories")


def marks_are_not_durable_before_chunks_are_deleted(recorder: Recorder, patch: pytest.MonkeyPatch) -> None:
    put, known = LocalStorage.put, dict[str, Any]()

    def put_unsynced(self: LocalStorage, key: str, data: bytes, expect: str = ANY) -> str:
        before, known[key] = known.get(key), marks_in(key, data)
        with recorder.skipping(*["directories"] * (before is not None and before != known[key])):
            return put(self, key, data, expect)

    patch.setattr(LocalStorage, "put", put_unsynced)


def records_are_renamed_without_a_sync(recorder: Recorder, patch: pytest.MonkeyPatch) -> None:
    put = LocalStorage.put

    def put_unsynced(self: LocalStorage, key: str, data: bytes, expect: str = ANY) -> str:
        with recorder.skipping("files"):
            return put(self, key, data, expect)

    patch.setattr(LocalStorage, "put", put_unsynced)


def made(put: Put) -> Put:
    """The same with bytes that exist already."""
    data = put.make()
    return replace(put, make=lambda: data, make_pieces=None)


def has_chunks(wave: Iterable[Put]) -> bool:
    return any(not put.key.endswith("zarr.json") for put in wave)


def marks_in(key: str, data: bytes) -> tuple[Any, ...]:
    """What the record of a stream gives up; nothing, if this is another object."""
    if not key.startswith("streams/") or key.count("/") != 2:
        return ()
    own = json.loads(data)["attributes"]["trajstore"]
    return own["first_row"], own["view"]["first_rows"]


PLANTED: list[tuple[Bug, Work]] = [
    (chunks_are_not_synced, writing),
    (chunks_are_not_synced, checkpoints_with_priorities),
    (chunks_are_not_synced, columns),
    (files_left_for_the_end_of_a_wave_are_not_synced, writing),
    (files_left_for_the_end_of_a_wave_are_not_synced, checkpoints_with_priorities),
    (files_get_their_names_before_they_are_synced, writing),
    (the_record_is_put_before_the_chunks, writing),
    (the_record_is_put_before_the_chunks, checkpoints_with_priorities),
    (directories_are_not_synced, writing),
    (directories_are_not_synced, checkpoints_with_priorities),
    (marks_are_not_durable_before_chunks_are_deleted, eviction_beside_a_checkpoint),
    (records_are_renamed_without_a_sync, writing),
    (records_are_renamed_without_a_sync, checkpoints_with_priorities),
]


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "work"), PLANTED, ids=lambda found: found.__name__)
def test_a_planted_bug_that_shows_only_at_a_loss_of_power_is_found(room: Path, bug: Bug, work: Work) -> None:
    ledger = recorded(room, work, bug)
    last = len(ledger.versions) - 1
    assert not fault(look(ledger.url), ledger.versions, last, last)
    outcome = Explorer(ledger, room).run(N_PLANTED, 0, ends_at_violation=True)
    _log.info("%s", outcome)
    assert outcome.violations, str(outcome)


# ---- the model --------------------------------------------------------------------------------------------


def opened(path: str, handle: int, *, creates: bool = True) -> Operation:
    return Operation("open", path, handle=handle, creates=creates)


def put(path: str, data: bytes, handle: int, *, is_synced: bool = True) -> list[Operation]:
    written = [opened(path, handle), Operation("write", path, data=data, handle=handle)]
    return [*written, Operation("fsync", path, handle=handle)] if is_synced else written


def synced(path: str, handle: int) -> list[Operation]:
    return [opened(path, handle, creates=False), Operation("fsync", path, handle=handle)]


def left(*operations: Operation) -> list[dict[str, bytes | None]]:
    """All that a crash after these operations may leave."""
    system, rng = FileSystem(), np.random.default_rng(0)
    for operation in operations:
        system.apply(operation)
    return [system.tree(c) for c in (*system.choices(), *(system.random_choice(rng) for _ in range(200)))]


def test_data_that_was_not_synced_may_be_lost_torn_or_zeros() -> None:
    trees = left(*put("a", b"1234", 1, is_synced=False))
    assert {tree.get("a") for tree in trees} == {None, b"", b"12", b"1234", bytes(4)}


def test_a_sync_of_a_file_keeps_its_data_and_not_its_name() -> None:
    assert {tree.get("a") for tree in left(*put("a", b"1234", 1))} == {None, b"1234"}


def test_a_sync_of_a_file_and_its_directory_keeps_both() -> None:
    assert left(*put("a", b"1234", 1), *synced(".", 2))[0] == {"a": b"1234"}
    assert {tree["a"] for tree in left(*put("a", b"1234", 1), *synced(".", 2))} == {b"1234"}


def test_names_of_one_directory_are_independent_of_each_other() -> None:
    trees = left(*put("a", b"1", 1), *put("b", b"2", 2))
    assert {frozenset(tree) for tree in trees} == {frozenset(), frozenset("a"), frozenset("b"), frozenset("ab")}


def test_a_rename_loses_neither_the_old_file_nor_the_new_one() -> None:
    before = [*put("a", b"old", 1), *put("b", b"new", 2), *synced(".", 3)]
    trees = left(*before, Operation("rename", "b", "a"))
    assert {tuple(sorted(tree.items())) for tree in trees} == {
        (("a", b"old"), ("b", b"new")),
        (("a", b"new"), ("b", b"new")),
        (("a", b"new"),),
    }


def test_a_rename_between_directories_may_leave_both_names_and_never_none() -> None:
    made = [Operation("mkdir", "d"), Operation("mkdir", "e"), *synced(".", 1)]
    moved = [*made, *put("d/a", b"1", 2), *synced("d", 3), Operation("rename", "d/a", "e/a")]
    found = {frozenset(tree) - {"d", "e"} for tree in left(*moved)}
    assert found == {frozenset({"d/a"}), frozenset({"d/a", "e/a"}), frozenset({"e/a"})}
    assert {frozenset(tree) - {"d", "e"} for tree in left(*moved, *synced("d", 4))} == {frozenset({"e/a"})}
    assert {"e/a" in tree for tree in left(*moved, *synced("e", 4))} == {True}


def test_a_directory_that_is_renamed_has_one_name() -> None:
    made = [Operation("mkdir", "d"), Operation("mkdir", "d/x"), Operation("mkdir", "e"), *synced(".", 1)]
    trees = left(*made, *synced("d", 2), Operation("rename", "d/x", "e/x"))
    assert {frozenset(tree) - {"d", "e"} for tree in trees} == {frozenset({"d/x"}), frozenset({"e/x"})}


def test_a_name_that_was_removed_may_come_back_until_its_directory_is_synced() -> None:
    gone = [*put("a", b"1", 1), *synced(".", 2), Operation("unlink", "a")]
    assert {"a" in tree for tree in left(*gone)} == {True, False}
    assert {"a" in tree for tree in left(*gone, *synced(".", 3))} == {False}


def test_a_file_that_is_truncated_may_keep_its_old_data() -> None:
    before = [*put("a", b"old", 1), *synced(".", 2)]
    again = [Operation("open", "a", handle=3, truncates=True), Operation("write", "a", data=b"later", handle=3)]
    assert {tree["a"] for tree in left(*before, *again)} == {b"old", b"", b"la", b"later", bytes(5)}


def test_all_lost_and_all_kept_are_among_the_choices() -> None:
    trees = left(*put("a", b"1", 1, is_synced=False), *put("b", b"2", 2, is_synced=False))
    assert {} in trees
    assert {"a": b"1", "b": b"2"} in trees


def test_an_image_takes_on_one_state_after_the_other(tmp_path: Path) -> None:
    image = Image(tmp_path / "image")
    for tree in ({"d": None, "d/a": b"1"}, {"d": None, "d/a": b"2", "d/b": b""}, {"a": b"3"}):
        image.show(tree)
        found = {p.relative_to(image.base).as_posix(): p for p in image.base.rglob("*")}
        assert {path: None if p.is_dir() else p.read_bytes() for path, p in found.items()} == tree


def test_what_goes_past_the_recorder_is_noticed(room: Path) -> None:
    recorder = Recorder(room / "recorded")
    recorder.base.mkdir()
    with pytest.raises(AssertionError, match="past the recorder"), recorder.recording():
        (recorder.base / "stray").write_bytes(b"")
