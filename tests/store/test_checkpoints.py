"""Checkpoints: saved all or nothing, found by lineage, read back exactly, shown for good."""

from __future__ import annotations

import collections
import contextlib
import enum
import json
import math
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import trajstore
from tests.conftest import Place
from tests.format.test_hostile_stores import BAD, dump, many, paths_of, replaced, resealed
from tests.support.faulty import DieAt, Died, FailOnce, FaultyStorage, Plan, broken, real_storage
from tests.support.sharding import mark, pack, read_record
from trajstore.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    ClosedError,
    ConflictError,
    CorruptionError,
    DataError,
    FormatError,
    SchemaError,
    SnapshotExpiredError,
    StorageError,
)
from trajstore.format.commit_record import SessionView
from trajstore.format.ids import new_id
from trajstore.format.zarr_json import to_json_bytes
from trajstore.schema import DTYPES, Field, Schema
from trajstore.storage import Storage, open_storage
from trajstore.store import state_codec as state
from trajstore.store.checkpoints import (
    Checkpoint,
    StreamExtent,
    find,
    list_checkpoints,
    new_checkpoint,
    new_checkpoint_id,
    pins,
    read_state,
    remove,
    remove_incomplete,
    save,
)
from trajstore.store.snapshot import Snapshot

SCHEMA = Schema(
    {
        "observation": Field("float32", (2,), final=True, chunk_rows=4),
        "action": Field("int64", chunk_rows=8),
        "reward": Field("float32", chunk_rows=4),
    },
    episode={"task": str},
)
MakePlace = Callable[[str], Place]
EVERY_CALL = [("local", 1), ("memory", 1), pytest.param("s3", 6, marks=pytest.mark.s3)]


def steps(n: int, seed: int = 0, *, n_final: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "observation": rng.normal(size=(n + n_final, 2)).astype(np.float32),
        "action": rng.integers(0, 99, n),
        "reward": rng.normal(size=n).astype(np.float32),
    }


def step(seed: int) -> dict[str, Any]:
    return {name: values[0] for name, values in steps(1, seed).items()}


def small_state() -> dict[str, Any]:
    return {
        "seed": 7,
        "rng": (1, [2.5, math.inf]),
        "priorities": {"values": np.arange(300, dtype=np.float32), "rows": np.arange(100)},
        "text": "é",
    }


def checkpoint_of(storage: Storage, name: str = "first", **changes: Any) -> Checkpoint:
    made = new_checkpoint(new_checkpoint_id(name), name, world="w", streams=Snapshot.load(storage, None).cuts())
    return replace(made, **changes)


def saved(storage: Storage, name: str = "first", tree: Any = None, **changes: Any) -> Checkpoint:
    return save(storage, checkpoint_of(storage, name, **changes), tree)


def empty_store(place: Place) -> Storage:
    trajstore.create(place.url, SCHEMA, fsync=False, **place.kwargs)
    return real_storage(place.url, place.options)


@pytest.fixture
def storage(new_place: MakePlace) -> Storage:
    return empty_store(new_place("memory"))


def assert_same(read: Any, written: Any) -> None:
    """The same tree: types of what is no array, dtypes, shapes and bits of arrays."""
    if isinstance(written, (np.ndarray, np.generic)):
        assert isinstance(read, np.ndarray)
        assert (read.dtype, read.shape) == (written.dtype.newbyteorder("="), written.shape)
        assert read.tobytes() == written.astype(read.dtype).tobytes()
        return
    assert type(read) is type(written)
    if isinstance(written, dict):
        assert list(read) == list(written)
        for key in written:
            assert_same(read[key], written[key])
    elif isinstance(written, (list, tuple)):
        assert len(read) == len(written)
        for ours, theirs in zip(read, written, strict=True):
            assert_same(ours, theirs)
    elif isinstance(written, float):
        assert repr(read) == repr(written)  # tells -0.0 and nan
    else:
        assert read == written


# ---- the state of a session ------------------------------------------------------------------------------

numbers = st.integers(-(1 << 200), 1 << 200) | st.integers(-(1 << 64), 1 << 65)
scalars = st.none() | st.booleans() | numbers | st.floats() | st.text(st.characters(exclude_categories=["Cs"]))


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(sorted(DTYPES - {"bfloat16"}))))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=5)))
    bits = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    made = (bits[..., 0] > 127) if dtype.kind == "b" else bits.view(dtype)[..., 0]
    if draw(st.booleans()) and made.ndim:
        made = made[::-1]
    return made.astype(made.dtype.newbyteorder(">")) if draw(st.booleans()) else made


keys = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(["$", "$$", "$array", "$tuple", "a/b"])
trees = st.recursive(
    scalars | arrays(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=12,
)


@given(trees)
@settings(max_examples=200)
def test_any_tree_comes_back_as_it_was(tree: Any) -> None:
    encoded, stored = state.encode(tree)
    text = state.dump(encoded)
    assert_same(state.decode(state.load(text), {str(i): array.values for i, array in enumerate(stored)}), tree)


@given(trees)
@settings(max_examples=25)
def test_any_tree_is_read_from_a_checkpoint_as_it_was_saved(tree: Any) -> None:
    storage = open_storage(f"memory://{new_id('tree')}")
    assert_same(read_state(storage, saved(storage, tree=tree)), tree)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((300_001,), "float32"), ((1, 600_000), "float64"), ((7, 40_000), "int64"), ((3, 5, 1 << 17), "uint8"),
     ((1 << 21,), "bool"), ((1,) * 33 + (700,), "int16"), ((1,) * 40 + (7,), "int16")],
)  # fmt: skip
def test_arrays_of_many_chunks_wide_rows_and_many_axes_come_back(
    storage: Storage, shape: tuple[int, ...], dtype: str
) -> None:
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    tree = {"a": array, "again": array[:1]}
    assert_same(read_state(storage, saved(storage, tree=tree)), tree)
    sizes = [np.prod(node.chunks) * node.dtype.itemsize for node in zarr_arrays(storage)]
    assert max(sizes, default=0) <= 1 << 20


def zarr_arrays(storage: Storage) -> list[zarr.Array]:
    root = zarr.open_group(storage.display, mode="r")
    return [node for path, node in root.members(max_depth=None) if "/state/" in path]


def test_tensors_and_bfloat16_come_back_as_numpy_arrays(storage: Storage) -> None:
    values = torch.arange(300, dtype=torch.float32) / 7
    tree = {
        "grad": torch.nn.Parameter(values),
        "half": values.bfloat16(),
        "scalar": torch.tensor(3, dtype=torch.int32),
        "ml": values.numpy().astype(ml_dtypes.bfloat16),
        "few": values[:3].bfloat16(),
        "turned": values.reshape(3, 100).T,
    }
    expected = values.bfloat16().float().numpy()
    read = read_state(storage, saved(storage, tree=tree))
    assert_same(read["grad"], values.numpy())
    assert_same(read["half"], expected)
    assert_same(read["ml"], expected)
    assert_same(read["few"], expected[:3])
    assert_same(read["scalar"], np.array(3, np.int32))
    assert_same(read["turned"], np.ascontiguousarray(values.numpy().reshape(3, 100).T))


def test_random_generators_can_be_saved(storage: Storage) -> None:
    generator = np.random.default_rng(3)
    tree = {"numpy": generator.bit_generator.state, "torch": torch.random.get_rng_state()}
    read = read_state(storage, saved(storage, tree=tree))
    other = np.random.default_rng(0)
    other.bit_generator.state = read["numpy"]
    assert other.integers(1 << 60) == generator.integers(1 << 60)
    assert torch.equal(torch.from_numpy(read["torch"]), tree["torch"])


class Colour(enum.IntEnum):
    RED = 1


Pair = collections.namedtuple("Pair", "x y")
loop: list[Any] = []
loop.append(loop)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1: "x"}, r"state 'a/b': expected text keys, got 1"),
        (b"bytes", r"state 'a/b': expected a mapping.* got bytes"),
        ({1, 2}, "got set"),
        (Colour.RED, "got Colour"),
        (Pair(1, 2), "got Pair"),
        (object(), "got object"),
        pytest.param(1 << 70_000, "expected integers of at most 65536 bits, got one of 70001", id="integer"),
        ("\ud800", r"state 'a/b': expected valid Unicode text"),
        ({"\ud800": 1}, "expected valid Unicode text"),
        (np.array(["x"]), r"a/b.*dtype str"),
        (np.array([1j]), r"a/b.*complex128"),
        (np.array([None]), r"a/b.*object"),
        (np.zeros(3, "datetime64[s]"), r"a/b.*datetime64"),
        (np.ma.masked_array([1, 2], [True, False]), "mask"),
        (torch.ones(2, dtype=torch.complex64), r"a/b.*complex64"),
        (torch.eye(3).to_sparse(), r"a/b"),
        (loop, "nested deeper than 100"),
    ],
)
def test_what_can_not_be_stored_is_refused_by_name_and_nothing_is_put(
    storage: Storage, value: Any, message: str
) -> None:
    before = storage.list_tree("")
    with pytest.raises(DataError, match=message):
        saved(storage, tree={"a": {"b": value}})
    assert storage.list_tree("") == before


@pytest.mark.parametrize(
    "changes",
    [{"id": "../x"}, {"name": "other"}, {"parent": "../x"}, {"created_at": math.nan}, {"created_at": "now"},
     {"world": 3}, {"streams": {"../x": StreamExtent(0, 1, 1, 0)}},
     {"streams": {new_id("s"): StreamExtent(2, 1, 1, 0)}},
     {"streams": {new_id("s"): StreamExtent(0, -1, 1, 0)}}],
)  # fmt: skip
def test_a_checkpoint_that_could_not_be_read_is_not_put(storage: Storage, changes: dict[str, Any]) -> None:
    before = storage.list_tree("")
    with pytest.raises(DataError, match="can't be stored"):
        save(storage, replace(checkpoint_of(storage), **changes), {})
    assert storage.list_tree("") == before


def test_a_long_text_is_stored_as_an_array(storage: Storage) -> None:
    tree = {"log": ["é" * 1000] * 1000, "array": np.arange(1000), "last": 1}
    checkpoint = saved(storage, tree=tree)
    assert_same(read_state(storage, checkpoint), tree)
    assert storage.size(f"checkpoints/{checkpoint.id}/zarr.json") < 10_000


def test_an_absurdly_long_text_is_refused(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_TEXT_BYTES", 1000)
    with pytest.raises(DataError, match=r"expected at most 1000 bytes without its arrays, got "):
        saved(storage, tree="x" * 1000)
    assert list_checkpoints(storage) == []


def test_plain_zarr_reads_the_arrays_of_a_state(place: Place) -> None:
    storage = empty_store(place)
    tree = {"a": np.arange(1000.0), "b": {"c": np.arange(3000, dtype=np.uint8).reshape(3, 1000)}, "d": [1, "x"]}
    checkpoint = saved(storage, tree=tree)
    group = trajstore.open(place.url, **place.kwargs).zarr_group()[f"checkpoints/{checkpoint.id}"]
    assert isinstance(group, zarr.Group)
    np.testing.assert_array_equal(group["state/0"][...], tree["a"])
    np.testing.assert_array_equal(group["state/1"][...], tree["b"]["c"])
    own = group.attrs["trajstore"]
    assert own["state"]["tree"]["d"] == [1, "x"]
    assert own["state"]["tree"]["b"]["c"] == {"$array": 1, "dtype": "uint8", "shape": [3, 1000]}
    flat = zarr.open_group(
        f"{place.url}/checkpoints/{checkpoint.id}",
        mode="r",
        use_consolidated=False,
        storage_options=place.options or None,
    )
    assert sorted(path for path, _ in flat.members(max_depth=None)) == ["state", "state/0", "state/1"]


# ---- saving ----------------------------------------------------------------------------------------------


def keys_of(storage: Storage) -> set[str]:
    return {key for key in storage.list_tree("checkpoints") if key != "checkpoints/zarr.json"}


def written_store(place: Place, *, is_sealed: bool = False) -> Storage:
    """A store with one finished stream, and one that goes on unless ``is_sealed``."""
    store = trajstore.create(place.url, SCHEMA, fsync=False, **place.kwargs)
    with store.writer("old", commit_seconds=None) as writer:
        writer.append_episode(steps(9, 1, n_final=1), terminated=True, metadata={"task": "reach"})
    writer = store.writer("new", commit_seconds=None)
    for t in range(6):
        writer.append(step(t))
    writer.commit()
    writer.close() if is_sealed else writer.release()
    return real_storage(place.url, place.options)


def test_a_checkpoint_is_read_back_as_it_was_saved(place: Place) -> None:
    storage = written_store(place)
    before = checkpoint_of(storage, parent=new_checkpoint_id("x"))
    checkpoint = save(storage, before, small_state())
    assert replace(checkpoint, is_complete=False) == before
    assert checkpoint.is_complete
    assert [cut.record is not None for cut in checkpoint.streams.values()] == [True, False]
    for found in (find(storage, "first"), find(storage, checkpoint.id), *list_checkpoints(storage)):
        assert found == checkpoint
        assert_same(read_state(storage, found), small_state())


def test_streams_of_one_schema_cost_a_checkpoint_little(storage: Storage) -> None:
    store = trajstore.open(storage.display)
    for i in range(20):
        with store.writer("w") as writer:
            writer.append_episode(steps(3, i), truncated=True)
    checkpoint = saved(storage)
    assert len(checkpoint.streams) == 20
    assert storage.size(f"checkpoints/{checkpoint.id}/zarr.json") < 20_000


def test_the_pin_comes_first_and_the_complete_record_last(storage: Storage) -> None:
    faulty = FaultyStorage(storage)
    checkpoint = checkpoint_of(storage)
    n_before_check: list[int] = []
    save(faulty, checkpoint, small_state(), check=lambda: n_before_check.append(faulty.n_calls("put")))
    puts = [call.key.removeprefix(f"checkpoints/{checkpoint.id}/") for call in faulty.calls if call.action == "put"]
    assert n_before_check == [1]
    assert puts[0] == puts[-1] == "zarr.json"
    assert puts[1:-1] == [
        "state/zarr.json",
        "state/0/zarr.json",
        "state/1/zarr.json",
        "state/0/c.0",
        "state/1/c.0",
    ]


def test_rows_are_pinned_before_the_marks_are_read_again(place: Place) -> None:
    storage = written_store(place)
    checkpoint = checkpoint_of(storage)
    seen: list[Any] = []
    save(storage, checkpoint, {}, check=lambda: seen.append((pins(storage), list_checkpoints(storage))))
    assert seen == [(dict.fromkeys(checkpoint.streams, 0), [])]


def test_a_checkpoint_that_fails_its_check_leaves_nothing(place: Place) -> None:
    storage = written_store(place)

    def fail() -> None:
        raise SnapshotExpiredError("passed")

    with pytest.raises(SnapshotExpiredError, match="passed"):
        save(storage, checkpoint_of(storage), small_state(), check=fail)
    assert keys_of(storage) == set()
    assert pins(storage) == {}
    saved(storage)


def test_marks_are_read_once_more_where_saving_took_so_long_that_the_pin_expires(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_checks: list[int] = []
    save(storage, checkpoint_of(storage), {}, check=lambda: n_checks.append(1))
    assert len(n_checks) == 1
    monkeypatch.setattr("trajstore.store.checkpoints.saving.PENDING_S", 0.0)
    save(storage, checkpoint_of(storage), {}, check=lambda: n_checks.append(1))
    assert len(n_checks) == 3


def test_a_checkpoint_that_is_removed_while_it_is_saved_is_not_saved(place: Place) -> None:
    storage = empty_store(place)
    checkpoint = checkpoint_of(storage)
    with pytest.raises(ConflictError, match="was removed while it was being saved"):
        save(storage, checkpoint, small_state(), check=lambda: remove(storage, checkpoint.id))
    assert list_checkpoints(storage) == []
    assert keys_of(storage) == set()


def test_another_checkpoint_of_the_same_id_is_not_replaced(place: Place) -> None:
    storage = empty_store(place)
    checkpoint = saved(storage, tree={"a": 1})
    with pytest.raises(ConflictError, match="exists already"):
        save(storage, checkpoint, {"a": 2})
    assert read_state(storage, checkpoint) == {"a": 1}
    assert save(storage, checkpoint, {"a": 1}) == checkpoint  # as after a lost answer


class EachPut(Plan):
    """Calls a function after every n-th put and removal."""

    def __init__(self, function: Callable[[], object], stride: int) -> None:
        self._function = function
        self._stride = stride

    def after(self, call: Any) -> None:
        if call.action in ("put", "delete", "remove_tree") and call.number % self._stride == 0:
            self._function()


def walk(place: Place) -> dict[str, Any]:
    """Plain zarr walks all of it; a warning is an error here."""
    options = {**place.options, "use_listings_cache": False} if place.options else None
    root = zarr.open_group(place.url, mode="r", storage_options=options)
    return dict(root.members(max_depth=None))


@pytest.mark.parametrize(
    ("kind", "stride", "is_reversed"),
    [("local", 1, False), ("local", 1, True), ("memory", 1, False), ("memory", 1, True),
     pytest.param("s3", 4, True, marks=pytest.mark.s3)],
)  # fmt: skip
def test_plain_zarr_walks_the_store_at_every_put_and_delete_without_a_warning(
    new_place: MakePlace, kind: str, stride: int, is_reversed: bool
) -> None:
    place = new_place(kind)
    storage = written_store(place, is_sealed=True)
    faulty = FaultyStorage(storage, EachPut(lambda: walk(place), stride), is_reversed=is_reversed)
    checkpoint = save(faulty, checkpoint_of(storage), small_state())
    assert f"checkpoints/{checkpoint.id}/state/1" in walk(place)
    n_calls = len(faulty.calls)
    remove(faulty, checkpoint.id)
    assert len(faulty.calls) > n_calls + 5
    assert not any("state" in path for path in walk(place))


def n_calls_of(place: Place, run: Callable[[Storage, Checkpoint], object]) -> int:
    storage = written_store(place)
    faulty = FaultyStorage(storage)
    run(faulty, checkpoint_of(storage))
    return len(faulty.calls)


def save_small(storage: Storage, checkpoint: Checkpoint) -> Checkpoint:
    return save(storage, checkpoint, small_state())


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("kind", "stride"), EVERY_CALL)
def test_a_death_at_any_call_of_save_leaves_a_whole_checkpoint_or_none(
    new_place: MakePlace, kind: str, stride: int, is_after: bool
) -> None:
    n_calls = n_calls_of(new_place(kind), save_small)
    place = new_place(kind)
    storage = written_store(place)
    n_whole = 0
    for at in range(1, n_calls + 1, stride):
        checkpoint = checkpoint_of(storage)
        with pytest.raises(Died):
            save_small(FaultyStorage(storage, DieAt(at, is_after), is_reversed=at % 2 == 0), checkpoint)
        for found in list_checkpoints(storage):
            n_whole += 1
            assert_same(read_state(storage, found), small_state())
            remove(storage, found.id)
        if kind != "s3":
            walk(place)
        assert pins(storage) in ({}, dict.fromkeys(checkpoint.streams, 0))
        save_small(storage, checkpoint)
        assert_same(read_state(storage, find(storage, "latest")), small_state())
        remove(storage, checkpoint.id)
        assert keys_of(storage) == set()
    assert n_whole == (1 if is_after and stride == 1 else n_whole)


@pytest.mark.parametrize("is_after", [False, True], ids=["error", "lost_answer"])
@pytest.mark.parametrize(("kind", "stride"), EVERY_CALL)
def test_an_error_at_any_call_of_save_leaves_nothing_and_it_can_be_saved_again(
    new_place: MakePlace, kind: str, stride: int, is_after: bool
) -> None:
    n_calls = n_calls_of(new_place(kind), save_small)
    storage = written_store(new_place(kind))
    for at in range(1, n_calls + 1, stride):
        checkpoint = checkpoint_of(storage)
        with pytest.raises(StorageError):
            save_small(FaultyStorage(storage, FailOnce(at, is_after, broken)), checkpoint)
        assert keys_of(storage) == set()
        save_small(storage, checkpoint)
        assert_same(read_state(storage, find(storage, checkpoint.id)), small_state())
        remove(storage, checkpoint.id)


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_a_death_at_any_call_of_remove_leaves_a_whole_checkpoint_or_none(
    new_place: MakePlace, is_after: bool
) -> None:
    place = new_place("memory")
    storage = written_store(place)

    def life(plan: Plan) -> FaultyStorage:
        checkpoint = save_small(storage, checkpoint_of(storage))
        faulty = FaultyStorage(storage, plan, is_reversed=True)
        remove(faulty, checkpoint.id)
        return faulty

    for at in range(1, len(life(Plan()).calls) + 1):
        with pytest.raises(Died):
            life(DieAt(at, is_after))
        for found in list_checkpoints(storage):
            assert_same(read_state(storage, found), small_state())
            remove(storage, found.id)
        walk(place)
        assert pins(storage) == {}
        remove_incomplete(storage)
        assert keys_of(storage) == set()


def test_removing_twice_is_fine_and_only_one_goes(place: Place) -> None:
    storage = written_store(place)
    first, second = save_small(storage, checkpoint_of(storage)), saved(storage, "second")
    for _ in range(2):
        remove(storage, first.id)
        assert list_checkpoints(storage) == [second]
    with pytest.raises(CheckpointNotFoundError, match="was removed"):
        read_state(storage, first)
    with pytest.raises(ValueError, match="not the id of a checkpoint"):
        remove(storage, "../streams")


# ---- pins ------------------------------------------------------------------------------------------------


def died_saving(storage: Storage, **changes: Any) -> Checkpoint:
    checkpoint = checkpoint_of(storage, "died", **changes)
    with pytest.raises(Died):
        save(FaultyStorage(storage, DieAt(3, True)), checkpoint, small_state())
    return checkpoint


def test_a_stream_is_pinned_at_the_smallest_row_that_a_checkpoint_wants(storage: Storage) -> None:
    a, b = new_id("a"), new_id("b")
    saved(storage, streams={a: StreamExtent(5, 9, 1, 0), b: StreamExtent(0, 3, 1, 0)})
    saved(storage, streams={a: StreamExtent(3, 9, 1, 0)})
    saved(storage, streams={b: StreamExtent(2, 3, 1, 0)})
    assert pins(storage) == {a: 3, b: 0}


def test_incomplete_checkpoints_pin_until_they_are_old_and_are_removed_then(place: Place) -> None:
    storage = empty_store(place)
    stream = new_id("a")
    died = died_saving(storage, streams={stream: StreamExtent(5, 9, 1, 0)})
    whole = saved(storage, streams={stream: StreamExtent(7, 9, 1, 0)})
    assert pins(storage) == {stream: 5}
    assert remove_incomplete(storage) == []
    assert pins(storage, pending_s=0) == {stream: 7}
    assert remove_incomplete(storage, pending_s=0) == [died.id]
    assert storage.list_names("checkpoints") == [whole.id, "zarr.json"]
    assert pins(storage) == {stream: 7}


def test_readers_ignore_incomplete_checkpoints(storage: Storage) -> None:
    died = died_saving(storage)
    assert list_checkpoints(storage) == []
    for which in (died.id, "died", "latest"):
        with pytest.raises(CheckpointNotFoundError, match="the store has none"):
            find(storage, which)
    with pytest.raises(CheckpointNotFoundError, match="was removed"):
        read_state(storage, died)


# ---- lineage ---------------------------------------------------------------------------------------------


def chain(storage: Storage, *names: str, parent: str | None = None, clock: int = 0) -> list[Checkpoint]:
    made: list[Checkpoint] = []
    for i, name in enumerate(names):
        made.append(saved(storage, name, parent=parent, created_at=float(clock - i)))  # clocks may run backwards
        parent = made[-1].id
    return made


def test_checkpoints_are_listed_by_lineage_not_by_clock(storage: Storage) -> None:
    a, b, c = chain(storage, "a", "b", "c")
    (d,) = chain(storage, "d", parent=a.id, clock=-10)
    (e,) = chain(storage, "e", clock=5)
    assert [x.name for x in list_checkpoints(storage)] == ["a", "d", "b", "c", "e"]
    assert trajstore.open(storage.display).checkpoints == [a, d, b, c, e]


def test_latest_is_the_one_that_none_descends_from(storage: Storage) -> None:
    *_, last = chain(storage, "a", "b", "c")
    assert find(storage, "latest") == last
    assert find(storage, "b").name == "b"


def test_latest_is_refused_where_two_sessions_continued_one_checkpoint(storage: Storage) -> None:
    a, b = chain(storage, "a", "b", clock=1_700_000_000)
    (c,) = chain(storage, "c", parent=a.id)
    with pytest.raises(AmbiguousCheckpointError) as error:
        find(storage, "latest")
    for part in (b.id, c.id, "'b'", "'c'", "2023-11-14 22:13:19", "give the id of one"):
        assert part in str(error.value)
    assert isinstance(error.value, LookupError)


def test_latest_is_known_also_when_checkpoints_between_were_removed(storage: Storage) -> None:
    a, b, c, d = chain(storage, "a", "b", "c", "d")
    remove(storage, b.id)
    remove(storage, c.id)
    assert find(storage, "latest") == d
    assert list_checkpoints(storage) == [a, d]
    (e,) = chain(storage, "e", parent=d.id)
    assert e.ancestors == (a.id,)  # those that are gone are not carried along
    assert find(storage, "latest") == e


def test_of_several_of_one_name_the_youngest_descendant_is_meant(storage: Storage) -> None:
    first, _, again = chain(storage, "a", "b", "a")
    assert find(storage, "a") == again
    assert find(storage, first.id) == first
    (other,) = chain(storage, "a", parent=first.id)
    with pytest.raises(AmbiguousCheckpointError) as error:
        find(storage, "a")
    assert again.id in str(error.value)
    assert other.id in str(error.value)
    assert first.id not in str(error.value)


def test_what_is_not_found_lists_what_there_is(storage: Storage) -> None:
    (a,) = chain(storage, "a")
    for which in ("b", new_checkpoint_id("b"), "", "../x"):
        with pytest.raises(CheckpointNotFoundError, match=f"the store has 'a' .*{a.id}"):
            find(storage, which)


def test_a_checkpoint_can_be_found_though_another_one_is_damaged(storage: Storage) -> None:
    a, b = chain(storage, "a", "b")
    storage.put(f"checkpoints/{a.id}/zarr.json", b"{}")
    assert find(storage, b.id) == b


@pytest.mark.parametrize("name", ["latest", "", "../x", "a/b", ".a", "con", "x" * 65])
def test_a_name_that_means_something_else_or_nothing_is_refused(name: str) -> None:
    with pytest.raises(SchemaError, match="checkpoint name"):
        new_checkpoint_id(name)


def test_checkpoints_that_descend_from_themselves_are_refused(storage: Storage) -> None:
    ids = [new_checkpoint_id("a"), new_checkpoint_id("a")]
    for id_, parent in zip(ids, reversed(ids), strict=True):
        save(storage, Checkpoint(id_, "a", 0.0, parent), {})
    with pytest.raises(FormatError, match="descend from themselves"):
        list_checkpoints(storage)


# ---- time travel -----------------------------------------------------------------------------------------


def shown(snapshot: Any) -> dict[Any, Any]:
    found = {}
    for i, row in enumerate(snapshot.episodes):
        arrays = [array.tobytes() for array in snapshot.read_episode(i).values()]
        found[snapshot.episodes.key(i)] = (row["end"], row["length"], row["task"], arrays)
    return found


def test_a_store_opened_at_a_checkpoint_shows_exactly_that_for_good(place: Place) -> None:
    store = trajstore.create(place.url, SCHEMA, fsync=False, **place.kwargs)
    storage = real_storage(place.url, place.options)
    with store.writer("old") as old:
        old.append_episode(steps(9, 1, n_final=1), terminated=True, metadata={"task": "reach"})
    writer = store.writer("new", commit_seconds=None)
    for t in range(6):
        writer.append(step(t), env=0)
    writer.commit()
    store.refresh()
    before = shown(store)
    checkpoint = saved(storage, "then")
    for t in range(6, 20):
        writer.append(step(t), env=0)
    writer.end_episode(terminated=True, metadata={"task": "later"})
    writer.append_episode(steps(5, 3), truncated=True)
    expected = {k: ("cut" if v[0] == "open" else v[0], *v[1:]) for k, v in before.items()}
    assert sorted(v[0] for v in expected.values()) == ["cut", "terminated"]
    assert shown(trajstore.open(place.url, at="then", **place.kwargs)) == expected
    writer.close()
    with store.writer("third") as third:
        third.append_episode(steps(5, 4), truncated=True)

    for at in ("then", checkpoint.id, "latest"):
        then = trajstore.open(place.url, at=at, **place.kwargs)
        assert then.refresh() is then.snapshot
        assert shown(then) == expected
        assert then.checkpoints == [checkpoint]
        assert len(trajstore.open(place.url, **place.kwargs)) == 4
        if "memory" not in place.url:
            assert shown(ForkingPickler.loads(bytes(ForkingPickler.dumps(then)))) == expected


def test_a_store_opened_at_a_checkpoint_has_no_writers(storage: Storage) -> None:
    saved(storage)
    with pytest.raises(ClosedError, match=r"opened at checkpoint 'first-.*open it without at="):
        trajstore.open(storage.display, at="first").writer()


def test_opening_at_a_checkpoint_reads_no_record_of_a_finished_stream(new_place: MakePlace) -> None:
    storage = written_store(new_place("local"), is_sealed=True)
    checkpoint = saved(storage)
    faulty = FaultyStorage(storage)
    assert Snapshot.at(faulty, None, checkpoint).n_rows == 16
    assert [call.action for call in faulty.calls] == ["list_names"]


def test_a_checkpoint_of_a_store_at_a_checkpoint_is_the_same_cut(new_place: MakePlace) -> None:
    storage = written_store(new_place("memory"))
    first = saved(storage)
    then = Snapshot.at(storage, None, first)
    again = save(storage, new_checkpoint(new_checkpoint_id("x"), "x", streams=then.cuts()), {})
    assert [cut.record is not None for cut in again.streams.values()] == [True, True]
    assert shown(Snapshot.at(storage, None, again)) == shown(then)


def test_a_checkpoint_names_the_streams_that_it_misses(new_place: MakePlace) -> None:
    place = new_place("memory")
    storage = written_store(place)
    (open_stream,) = (name for name, cut in saved(storage).streams.items() if cut.record is None)
    storage.remove_tree(f"streams/{open_stream}")
    with pytest.raises(CorruptionError, match=f"needs streams that are missing: {open_stream}"):
        trajstore.open(place.url, at="first")


def test_a_stream_with_fewer_rows_than_a_checkpoint_lists_is_corruption(new_place: MakePlace) -> None:
    storage = written_store(new_place("memory"))
    checkpoint = checkpoint_of(storage)
    streams = {name: replace(cut, stop=cut.stop + 1, record=None) for name, cut in checkpoint.streams.items()}
    checkpoint = save(storage, replace(checkpoint, streams=streams), {})
    with pytest.raises(CorruptionError, match=rf"{checkpoint.id}.*expected at least \(rows, spans, text bytes\)"):
        Snapshot.at(storage, None, checkpoint)


def test_rows_evicted_and_episodes_discarded_before_the_cut_stay_so(url: str) -> None:
    store = trajstore.create(url, SCHEMA, fsync=False)
    with store.writer("a") as writer:
        for i in range(4):
            writer.append_episode(steps(5, i), terminated=True)
    with store.writer("b") as other:
        other.append_episode(steps(5, 9), terminated=True)
    view = SessionView(first_rows={writer.stream: 5}, discarded={writer.stream: (2,)})
    mark(Path(url), read_record(Path(url), other.stream), view=view)
    before = shown(trajstore.open(url))
    assert len(before) == 3
    checkpoint = saved(open_storage(url))
    assert checkpoint.streams[writer.stream].first == 5
    later = SessionView(first_rows={writer.stream: 10}, discarded={writer.stream: (2, 3)})
    mark(Path(url), read_record(Path(url), other.stream), view=later)
    assert len(trajstore.open(url)) == 1
    assert shown(trajstore.open(url, at="first")) == before


def test_packed_streams_and_what_they_discard_are_shown_at_a_checkpoint(url: str) -> None:
    store = trajstore.create(url, SCHEMA, fsync=False)
    with store.writer("a") as writer:
        for i in range(4):
            writer.append_episode(steps(8, i), terminated=True)
    pack(Path(url), writer.stream, 0, 16)
    with store.writer("b") as other:
        other.append_episode(steps(5, 9), terminated=True)
    mark(Path(url), read_record(Path(url), other.stream), view=SessionView(discarded={writer.stream: (1, 3)}))
    before = shown(trajstore.open(url))
    saved(open_storage(url))
    assert len(before) == 3
    assert shown(trajstore.open(url, at="first")) == before


def test_streams_without_rows_are_not_listed(storage: Storage) -> None:
    store = trajstore.open(storage.display)
    with store.writer("a") as writer:
        writer.commit()
    assert Snapshot.load(storage, None).cuts() == {}


def test_a_lost_chunk_of_a_checkpoint_is_corruption_unless_the_checkpoint_is_gone(url: str) -> None:
    store = trajstore.create(url, SCHEMA, fsync=False)
    with store.writer("a") as writer:
        writer.append_episode(steps(20), terminated=True)
    checkpoint = saved(open_storage(url))
    record = read_record(Path(url), writer.stream)
    mark(Path(url), record, first_row=8)
    open_storage(url).delete([f"streams/{writer.stream}/steps/action/c.0"])
    then = trajstore.open(url, at="first")
    with pytest.raises(CorruptionError, match="missing"):
        then.read_episode(0)
    remove(open_storage(url), checkpoint.id)
    with pytest.raises(SnapshotExpiredError, match="evicted"):
        then.read_episode(0)


# ---- damaged and hostile ---------------------------------------------------------------------------------


def test_junk_beside_the_checkpoints_is_ignored(storage: Storage) -> None:
    checkpoint = saved(storage)
    storage.put("checkpoints/notes/zarr.json", b"{}")
    storage.put(f"checkpoints/{new_id('empty')}/x", b"junk")
    assert list_checkpoints(storage) == [checkpoint]
    assert pins(storage) == {}


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"\xff", to_json_bytes({"zarr_format": 3, "node_type": "group"})]
)
def test_a_foreign_or_damaged_checkpoint_is_named(storage: Storage, data: bytes) -> None:
    bad = new_id("bad")
    storage.put(f"checkpoints/{bad}/zarr.json", data)
    for use in (list_checkpoints, pins, remove_incomplete, lambda s: find(s, "latest"), lambda s: find(s, bad)):
        with pytest.raises(FormatError, match=bad):
            use(storage)
    remove(storage, bad)
    assert list_checkpoints(storage) == []


def test_any_flipped_byte_of_a_record_is_found(storage: Storage) -> None:
    checkpoint = saved(storage, tree=small_state())
    key = f"checkpoints/{checkpoint.id}/zarr.json"
    data = storage.get(key)
    for i in range(0, len(data), 7):
        storage.put(key, data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        with pytest.raises(FormatError):
            find(storage, checkpoint.id)


def test_a_damaged_or_missing_chunk_of_the_state_is_named(place: Place) -> None:
    storage = empty_store(place)
    checkpoint = saved(storage, tree=small_state())
    key = f"checkpoints/{checkpoint.id}/state/0/c.0"
    data = storage.get(key)
    storage.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptionError, match=r"state/0/c\.0: checksum"):
        read_state(storage, checkpoint)
    storage.delete([key])
    with pytest.raises(CorruptionError, match=r"state/0/c\.0 is missing"):
        read_state(storage, checkpoint)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints") / "store"
    storage = written_store(Place(str(root), {}))
    tree = {**small_state(), "small": np.arange(3), "big": 1 << 99}
    save(storage, checkpoint_of(storage, parent=new_id("x")), tree)
    return root


def harmless(root: Path) -> None:
    """Opening, listing and reading works or is refused."""
    storage = open_storage(root)
    for use in (
        lambda: pins(storage),
        lambda: shown(trajstore.open(root, at="first")),
        lambda: [read_state(storage, found) for found in list_checkpoints(storage)],
    ):
        with contextlib.suppress(FormatError, CorruptionError, SchemaError, LookupError):
            use()


@pytest.fixture
def copied(template: Path, tmp_path: Path) -> Path:
    root = tmp_path / "inner" / "store"
    shutil.copytree(template, root)
    return root


@given(data=st.data())
@settings(many, max_examples=60)
def test_any_change_to_a_checkpoint_is_refused_or_harmless(
    template: Path, copied: Path, data: st.DataObject
) -> None:
    (file,) = copied.glob("checkpoints/*-*/zarr.json")
    parsed = json.loads((template / file.relative_to(copied)).read_bytes())
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(list(paths_of(parsed))))
        replaced(parsed, path, data.draw(st.sampled_from(BAD)))
    file.write_text(resealed(dump(parsed)))
    tracemalloc.start()
    try:
        harmless(copied)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def forged(storage: Storage, edit: Callable[[dict[str, Any], dict[str, Any]], None]) -> Checkpoint:
    """A checkpoint whose state and nodes were edited."""
    checkpoint = saved(storage, tree={"a": np.arange(1000.0), "b": 1})
    key = f"checkpoints/{checkpoint.id}/zarr.json"
    data = json.loads(storage.get(key))
    edit(data["attributes"]["trajstore"]["state"], data["consolidated_metadata"]["metadata"])
    storage.put(key, resealed(json.dumps(data)).encode())
    return checkpoint


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def forgeries() -> Iterator[Any]:
    def shape(rows: int) -> Callable[[Any, Any], None]:
        return lambda state, nodes: nodes["state/0"].update(shape=[rows])

    yield pytest.param(shape(1 << 61), CorruptionError, "missing", id="absurd length")
    yield pytest.param(shape(0), FormatError, "for float64 of shape", id="no length")
    yield pytest.param(
        lambda s, n: n["state/0"]["chunk_grid"]["configuration"].update(chunk_shape=[1 << 26]),
        FormatError, "expected chunks of at most", id="absurd chunk",
    )  # fmt: skip
    for tree, message in {
        '{"$array": 1, "dtype": "float64", "shape": [1000]}': "refers to array 1",
        '[{"$array": 0, "dtype": "float64", "shape": [1000]}, {"$array": 0, "dtype": "float64", "shape": [1000]}]':
            "refers to array 0, expected 1",
        '{"$array": 0, "dtype": "object", "shape": [1000]}': "an array of 'object'",
        '{"$array": 0, "dtype": "float64", "shape": [-1000]}': "of shape",
        '{"$array": 0, "dtype": "float64", "shape": [4611686018427387903, 4611686018427387903]}': "of shape",
        '{"$array": 0, "dtype": "float64"}': "malformed",
        '{"$array": 0, "dtype": "int64", "shape": [1000]}': "1000 values of float64 for int64",
        '{"$bytes": "zz", "dtype": "int64", "shape": [1]}': "malformed",
        '{"$bytes": "00", "dtype": "int64", "shape": [1]}': "malformed",
        '{"$bytes": "", "dtype": "int64", "shape": [0, 4611686018427387903, 4611686018427387903]}': "malformed",
        '{"$float": "1"}': "malformed",
        '{"$int": 3}': "integer",
        '{"$int": "x"}': "malformed",
        '{"$tuple": 3}': "expected a list",
        '{"$unknown": 3}': "malformed",
        "1": "refers to 0 of its 1 arrays",
        json.dumps(nested(400)): "nested too deeply",
    }.items():  # fmt: skip
        yield pytest.param(
            lambda s, n, tree=tree: s.update(tree=json.loads(tree)), FormatError, message, id=tree[:60]
        )
    yield pytest.param(lambda s, n: s.update(arrays=10**15), FormatError, "state is malformed", id="absurd number")
    yield pytest.param(lambda s, n: s.pop("tree"), FormatError, "state is malformed", id="no tree")


@pytest.mark.parametrize(("edit", "error", "message"), list(forgeries()))
def test_a_forged_state_is_refused_without_allocating(
    storage: Storage, edit: Callable[..., None], error: type[Exception], message: str
) -> None:
    checkpoint = forged(storage, edit)
    tracemalloc.start()
    try:
        with pytest.raises(error, match=message):
            read_state(storage, checkpoint)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
