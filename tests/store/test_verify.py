"""Verifying: a healthy store is clean, and whatever is damaged, lost or contradictory is found and named."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from tests.conftest import Place
from tests.support.sharding import mark, pack, read_record, rewrite, write_record
from trajstore import CorruptionError, Field, FormatError, Schema, StorageError, StoreNotFoundError
from trajstore.format.commit_record import CommitRecord, SessionView
from trajstore.format.ids import new_id
from trajstore.schema import Array
from trajstore.storage import LocalStorage
from trajstore.store.checkpoints import Checkpoint, new_checkpoint_id, save
from trajstore.store.verify import VerifyProblem, VerifyReport, verify
from trajstore.store.verify import nodes as node_checks
from trajstore.store.verify.inspection import Inspection

STORES = Path(__file__).parents[1] / "stores"
SCHEMA = Schema(
    {
        "o": {"x": Field("float32", (2,), final=True, chunk_rows=4)},
        "f": Field("uint8", (3,), chunk_rows=4, codec="zstd:1"),
        "reward": Field("float64", chunk_rows=8, codec="none"),
    },
    episode={"seed": int, "score": float, "task": str},
)
STATE = {"rng": np.arange(4096), "step": 17, "names": ["a", "b"]}
SPAN_COLUMNS = ("episode", "env", "t_start", "row_start", "row_stop", "end", "has_final", "present", "text_stop")


@dataclass(frozen=True)
class Made:
    """A store with some of everything: two streams, derived columns, a checkpoint with a state."""

    root: Path
    first: str  # sealed; three episodes, of which the second has two spans
    second: str  # sealed; has the derived columns of the first
    checkpoint: str

    def path(self, key: str) -> Path:
        return self.root / key

    def chunk(self, path: str, index: int = 0) -> Path:
        layout = read_record(self.root, self.first).layouts[path]
        return self.root / "streams" / self.first / path / layout.chunk_key(index)

    def verify(self, **options: Any) -> VerifyReport:
        return verify(self.root, **options)


def steps(n: int, seed: int, n_final: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x, f = rng.random((n + n_final, 2), np.float32), rng.integers(0, 256, (n, 3), np.uint8)
    return {"o": {"x": x}, "f": f, "reward": rng.random(n)}


def fill(store: trajstore.Store) -> tuple[str, str]:
    with store.writer("first", commit_seconds=None) as first:
        first.append_episode(steps(6, 0, 1), terminated=True, metadata={"seed": 3, "task": "t", "note": "é"})
        first.commit()
        data = steps(7, 1)
        for t in range(7):
            first.append({"o": {"x": data["o"]["x"][t]}, "f": data["f"][t], "reward": data["reward"][t]}, env=2)
            if t == 3:
                first.commit()
        first.end_episode(env=2, truncated=True, metadata={"score": 0.5})
        first.append_episode(steps(5, 2, 1), truncated=True)
    with store.writer("second", commit_seconds=None) as second:
        second.append_episode(steps(4, 3), terminated=True)
        second.commit()
        values = np.linspace(0, 1, 20).astype(np.float32)
        second.put_column("priority", first.stream, values)
        second.put_column("advantage", first.stream, values.reshape(-1, 1))
        second.commit()
        second.put_column("priority", first.stream, values[:2], rows=np.array([19, 3]))
    return first.stream, second.stream


def build(root: Path) -> Made:
    store = trajstore.create(root, SCHEMA, fsync=False)
    first, second = fill(store)
    checkpoint = Checkpoint(new_checkpoint_id("c"), "c", 1.0, streams=store.refresh().cuts())
    saved = save(store.snapshot.storage, checkpoint, STATE)
    return Made(root, first, second, saved.id)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return build(tmp_path_factory.mktemp("verifying") / "store")


@pytest.fixture
def made(template: Made, tmp_path: Path) -> Made:
    """A fresh copy of a store with some of everything."""
    root = tmp_path / "store"
    shutil.copytree(template.root, root)
    return replace(template, root=root)


def objects(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def chunks(root: Path) -> list[Path]:
    return [path for path in objects(root) if path.name.startswith("c.")]


def nodes(root: Path) -> list[Path]:
    return [path for path in objects(root) if path.name == "zarr.json"]


def texts(report: VerifyReport) -> list[str]:
    return [str(problem) for problem in report.problems]


def assert_names(problem: VerifyProblem, root: Path, damaged: Path) -> None:
    """The problem says which object it is about: stream, array, chunk and rows, or the metadata."""
    parts = damaged.relative_to(root).parts
    if damaged.name.startswith("c."):
        path = "/".join(parts[2:-1])
        assert f"'{parts[1]}', array '{path}', chunk {damaged.name.split('.')[1]} (rows " in problem.where
    elif len(parts) > 3:
        assert f"'{parts[1]}', " in problem.where
        assert f" '{'/'.join(parts[2:-1])}', zarr.json" in problem.where
    else:
        assert (parts[1] if len(parts) == 3 else "/".join(parts)) in problem.where


def each_damaged(made: Made, found: list[Path], damage: Callable[[Path], None], **options: Any) -> None:
    """Damage one object after the other; each time just that is reported."""
    for path in found:
        before = path.read_bytes()
        damage(path)
        problems = made.verify(**options).problems
        assert problems, f"{path} was damaged and nobody saw it"
        assert_names(problems[0], made.root, path)
        path.write_bytes(before)
    assert made.verify(**options).is_clean


def flip(path: Path, position: int = -1, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def drop_checkpoint(made: Made) -> None:
    shutil.rmtree(made.root / "checkpoints" / made.checkpoint)


# ---- healthy stores ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [False, True])
def test_a_store_with_some_of_everything_is_clean(made: Made, fast: bool) -> None:
    report = made.verify(fast=fast)
    assert (report.problems, report.is_clean) == ([], True)
    counts = report.counts
    assert (counts["streams"], counts["rows"], counts["episodes"], counts["checkpoints"]) == (2, 24, 4, 1)
    assert counts["chunks"] > 20
    assert counts["bytes"] > 1000


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", sorted(path.name for path in STORES.glob("*.zip")))
def test_kept_stores_of_every_format_are_clean(name: str, fast: bool, tmp_path: Path) -> None:
    with zipfile.ZipFile(STORES / name) as archive:
        archive.extractall(tmp_path)
    (root,) = (path for path in tmp_path.iterdir() if path.is_dir())
    report = verify(root, fast=fast)
    assert (report.problems, report.notes) == ([], [])


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("index_at_start", [False, True])
def test_shards_are_looked_into(made: Made, fast: bool, index_at_start: bool) -> None:
    drop_checkpoint(made)
    rewrite(made.root, made.first, chunks_per_shard=2, index_at_start=index_at_start)
    assert made.verify(fast=fast).problems == []
    shard = made.root / "streams" / made.first / "steps/f/c.1.0"
    shard.unlink()
    assert [p.where for p in made.verify(fast=fast).problems] == [
        f"stream '{made.first}', array 'steps/f', chunks 2 to 3 (rows 8 to 16)"
    ]


def test_one_damaged_chunk_of_a_shard_is_named_alone(made: Made) -> None:
    drop_checkpoint(made)
    rewrite(made.root, made.first, chunks_per_shard=2)
    flip(made.root / "streams" / made.first / "steps/f/c.1.0")
    assert [p.where for p in made.verify().problems] == [
        f"stream '{made.first}', array 'steps/f', chunk 3 (rows 12 to 16)"
    ]


def test_rows_that_another_stream_holds_in_their_place_are_no_hole(made: Made) -> None:
    pack(made.root, made.first, 7, 14)
    assert made.verify().problems == []


def test_an_empty_store_is_clean(url: str) -> None:
    assert verify(trajstore.create(url)).problems == []


def test_every_backend_is_verified(place: Place) -> None:
    store = trajstore.create(place.url, SCHEMA, **place.kwargs)
    first, _ = fill(store)
    options = {"storage_options": place.options} if place.options else {}
    assert verify(place.url, fast=True, **options).problems == []
    storage = store.snapshot.storage
    key = f"streams/{first}/steps/f/c.2.0"
    storage.put(key, storage.get(key)[:-1])
    assert [p.where for p in verify(store).problems] == [
        f"stream '{first}', array 'steps/f', chunk 2 (rows 8 to 12)"
    ]


def test_a_store_that_is_being_written_is_clean(url: str) -> None:
    store = trajstore.create(url, SCHEMA, fsync=False)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            with store.writer(f"w{number}", commit_seconds=None) as writer:
                for _ in range(5):
                    writer.append_episode(steps(5, number), terminated=True)
                    writer.commit()
            number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(6):
            assert verify(url).problems == []
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("then", ["commit", "close"])
def test_a_commit_between_a_record_and_its_nodes_is_no_problem(
    url: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = trajstore.create(url, SCHEMA, fsync=False)
    writer = store.writer(commit_seconds=None)
    writer.append_episode(steps(5, 1), terminated=True)
    writer.commit()
    node_fault = node_checks._node_fault
    lock = threading.Lock()
    calls: list[str] = []

    def commit_first(inspection: Inspection, record: CommitRecord, path: str, expected: object) -> object:
        with lock:
            if not calls:
                writer.append_episode(steps(5, 1), terminated=True)
                getattr(writer, then)()
            calls.append(path)
        return node_fault(inspection, record, path, expected)

    monkeypatch.setattr(node_checks, "_node_fault", commit_first)
    assert verify(url).problems == []
    assert calls
    writer.close()


def test_what_a_writer_that_died_leaves_is_no_problem(url: str) -> None:
    store = trajstore.create(url, SCHEMA, fsync=False)
    writer = store.writer(commit_seconds=None)
    writer.append_rollout({"o": {"x": np.zeros((3, 1, 2), np.float32)}, "f": np.zeros((3, 1, 3), np.uint8),
                           "reward": np.ones((3, 1))}, envs=[0])  # fmt: skip
    writer.commit()
    writer.release()
    assert verify(url).problems == []


# ---- damaged objects -----------------------------------------------------------------------------------


def test_every_flipped_chunk_is_named_with_its_rows(made: Made) -> None:
    each_damaged(made, chunks(made.root), flip)


def test_every_truncated_object_is_named(made: Made) -> None:
    each_damaged(made, objects(made.root), lambda path: path.write_bytes(path.read_bytes()[:-7]))


def test_every_object_that_is_gone_is_named(made: Made) -> None:
    each_damaged(made, objects(made.root), lambda path: path.unlink())


def test_foreign_metadata_is_named(made: Made) -> None:
    foreign = itertools.cycle([b"[]", b'{"a": 1}', b"nonsense", b'{"zarr_format":3,"node_type":"other"}', b"\xff"])
    each_damaged(made, nodes(made.root), lambda path: path.write_bytes(next(foreign)))


def test_metadata_of_another_place_is_named(made: Made) -> None:
    """Each is valid where it comes from: of another stream, checkpoint or array."""
    donor = (made.root / "streams" / made.second / "zarr.json").read_bytes()
    array = (made.root / "streams" / made.second / "spans/text/zarr.json").read_bytes()
    own = {made.root / "streams" / made.second / name for name in ("zarr.json", "spans/text/zarr.json")}
    each_damaged(made, [p for p in nodes(made.root) if p not in own and len(p.parts) - len(made.root.parts) == 3],
                 lambda path: path.write_bytes(donor))  # fmt: skip
    each_damaged(made, [p for p in nodes(made.root) if p not in own and "steps" in p.parts],
                 lambda path: path.write_bytes(array))  # fmt: skip


def test_the_quick_look_finds_every_chunk_that_is_gone_or_empty(made: Made) -> None:
    each_damaged(made, chunks(made.root), lambda path: path.unlink(), fast=True)
    each_damaged(made, chunks(made.root), lambda path: path.write_bytes(b""), fast=True)


def test_the_quick_look_reads_no_steps(made: Made) -> None:
    flip(made.chunk("steps/f", 2))
    assert made.verify(fast=True).is_clean
    path = made.chunk("steps/reward", 1)  # not compressed, so its size is known
    path.write_bytes(path.read_bytes()[:-1])
    assert [str(p) for p in made.verify(fast=True).problems] == [
        f"stream '{made.first}', array 'steps/reward', chunk 1 (rows 8 to 16): has 67 bytes, expected 68"
    ]


@given(data=st.data())
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_bit_is_found(template: Made, data: st.DataObject) -> None:
    """But in the root, which has no checksum, and in scratch, which nobody reads."""
    ours = [p for p in objects(template.root) if p.parent not in (template.root, template.root / "scratch")]
    path = data.draw(st.sampled_from(ours))
    before = path.read_bytes()
    position = data.draw(st.integers(0, len(before) - 1))
    try:
        flip(path, position, data.draw(st.integers(0, 7)))
        report = template.verify()
    finally:
        path.write_bytes(before)
    assert not report.is_clean
    assert_names(report.problems[0], template.root, path)


def test_all_problems_are_reported(made: Made) -> None:
    flip(made.chunk("steps/f", 1))
    flip(made.chunk("spans/text"))
    made.chunk("steps/o/x", 4).unlink()
    (made.root / "streams" / made.second / "zarr.json").write_text("{}")
    (made.root / "schema" / "zarr.json").unlink()
    found = "\n".join(texts(made.verify()))
    for part in ("'steps/f', chunk 1", "'spans/text', chunk 0", "'steps/o/x', chunk 4", made.second, "schema/zarr"):
        assert part in found


def test_neighbouring_chunks_with_the_same_fault_are_one_problem(made: Made) -> None:
    for index in (1, 2, 4):
        made.chunk("steps/f", index).unlink()
    flip(made.chunk("steps/f", 3))
    array = f"stream '{made.first}', array 'steps/f'"
    assert texts(made.verify()) == [
        f"{array}, chunks 1 to 2 (rows 4 to 12): missing",
        f"{array}, chunk 3 (rows 12 to 16): checksum does not match",
        f"{array}, chunk 4 (rows 16 to 20): missing",
    ]


def test_an_object_that_cannot_be_read_is_a_problem(made: Made) -> None:
    path = made.chunk("steps/f", 1)
    path.unlink()
    path.mkdir()
    (problem,) = made.verify().problems
    assert problem.where.endswith("array 'steps/f', chunk 1 (rows 4 to 8)")
    assert problem.what.startswith("can't be read")


def test_a_storage_that_stops_answering_is_an_error_at_once(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LocalStorage.get_into
    asked: list[str] = []

    def fail(self: LocalStorage, key: str, *more: Any) -> Any:
        raise StorageError("the disk is gone")

    def get_into(self: LocalStorage, key: str, buffer: bytearray) -> memoryview:
        if "/steps/f/" not in key:
            return original(self, key, buffer)
        asked.append(key)
        monkeypatch.setattr(LocalStorage, "list_names", fail)
        raise StorageError("can't read the object")

    monkeypatch.setattr("trajstore.store.verify.decoding._AHEAD_BYTES", 1)
    monkeypatch.setattr(LocalStorage, "get_into", get_into)
    with pytest.raises(StorageError, match="the disk is gone"):
        made.verify()
    assert len(asked) == 1  # each further one would be tried for long


def edit_node(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))


@pytest.mark.parametrize("rows", [19, 21])
def test_an_array_of_a_sealed_stream_shows_all_of_its_rows(made: Made, rows: int) -> None:
    edit_node(made.root / "streams" / made.first / "steps/f/zarr.json", shape=[rows, 3])
    assert texts(made.verify()) == [
        f"stream '{made.first}', array 'steps/f', zarr.json: shows {rows} rows, the sealed record 20"
    ]


def test_an_array_of_an_open_stream_may_show_fewer_rows_but_not_more(url: str) -> None:
    with trajstore.create(url, SCHEMA, fsync=False).writer(commit_seconds=None) as writer:
        writer.append_episode(steps(5, 0), terminated=True)
        writer.commit()
        node = Path(url) / "streams" / writer.stream / "steps/f/zarr.json"
        for rows, what in ((0, []), (5, []), (6, ["shows 6 rows, the record 5"])):
            edit_node(node, shape=[rows, 3])
            assert [problem.what for problem in verify(url).problems] == what


@pytest.mark.parametrize("key", ["codecs", "attributes"])
def test_an_array_that_describes_itself_otherwise_than_the_record_is_named(made: Made, key: str) -> None:
    """It is valid, and no trajstore reader looks at it; but others would decode garbage."""
    other = {"codecs": [{"name": "bytes"}, {"name": "crc32c"}], "attributes": {"columns": []}}
    edit_node(made.root / "streams" / made.first / "steps/f/zarr.json", **{key: other[key]})
    (problem,) = made.verify().problems
    assert problem.where == f"stream '{made.first}', array 'steps/f', zarr.json"
    assert problem.what == f"differs from what the commit record says of it: {key}"


# ---- no store, or not ours -----------------------------------------------------------------------------


def test_a_place_without_a_store_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="there is no store here"):
        verify(tmp_path / "nothing")


def test_a_foreign_hierarchy_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zarr.json").write_text('{"zarr_format":3,"node_type":"group"}')
    with pytest.raises(FormatError, match="not part of a trajstore store"):
        verify(tmp_path)


def test_a_newer_format_is_refused(made: Made) -> None:
    root = made.root / "zarr.json"
    root.write_text(root.read_text().replace('"format":1', '"format":2'))
    with pytest.raises(FormatError, match="upgrade trajstore"):
        made.verify()


def test_a_root_without_id_or_time_is_a_problem(made: Made) -> None:
    root = made.root / "zarr.json"
    root.write_text(root.read_text().replace('"id"', '"di"'))
    assert texts(made.verify()) == ["zarr.json: has no id, or no time of creation"]


def test_a_stream_with_another_schema_is_a_problem(made: Made) -> None:
    shutil.rmtree(made.root / "checkpoints" / made.checkpoint)
    record = read_record(made.root, made.second)
    other = Schema({**{"o": {"x": SCHEMA["o/x"]}}, "f": SCHEMA["f"], "reward": Field("float64", final=True)},
                   episode=SCHEMA.episode)  # fmt: skip
    write_record(made.root, replace(record, schema=other))
    assert f"stream '{made.second}': has another schema: reward:" in texts(made.verify())[0]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"name": "third"}, "its name is 'third', but the stream's id does not begin with it"),
        ({"first_row": 21}, "its first row is 21, but it has 20 rows"),
        ({"rank": 3, "world_size": 2}, "its rank is 3, of 2"),
        ({"committed_at": 1e308 * 10}, None),
    ],
)
def test_a_record_that_contradicts_itself_is_a_problem(
    made: Made, changes: dict[str, Any], what: str | None
) -> None:
    record = replace(read_record(made.root, made.first), **changes)
    if what is None:  # a record of this kind can't even be written
        with pytest.raises(ValueError, match="not JSON compliant"):
            write_record(made.root, record)
        return
    write_record(made.root, record)
    assert any(
        p.where == f"stream '{made.first}', commit record" and what in p.what for p in made.verify().problems
    )


# ---- spans, returns, text, columns ---------------------------------------------------------------------


def edit_array(made: Made, stream: str, path: str, edit: Callable[[Array], None]) -> None:
    """Change values of the first chunk of an array, with a good checksum."""
    layout = read_record(made.root, stream).layouts[path]
    file = made.root / "streams" / stream / path / layout.chunk_key(0)
    block = layout.decode_new(file.read_bytes())
    edit(block)
    file.write_bytes(layout.encode(block))


def set_span(made: Made, span: int, **values: int) -> None:
    def edit(block: Array) -> None:
        for name, value in values.items():
            block[span, SPAN_COLUMNS.index(name)] = value

    edit_array(made, made.first, "spans/ints", edit)


@pytest.mark.parametrize(
    ("span", "values", "named", "what"),
    [
        (
            2,
            {"t_start": 5},
            "episode 1, span 2 (rows 11 to 14)",
            "begins at step 5, the previous span ends at step 4",
        ),
        (2, {"t_start": 3}, "episode 1, span 2 (rows 11 to 14)", "begins at step 3"),
        (
            0,
            {"t_start": 2},
            "episode 0, span 0 (rows 0 to 7)",
            "begins at step 2, but the steps before it are in no span",
        ),
        (
            1,
            {"row_stop": 10},
            "episode 1, span 2 (rows 11 to 14)",
            "begins at step 4, the previous span ends at step 3",
        ),
        (1, {"row_stop": 12}, "episode 1, span 2 (rows 11 to 14)", "begins before the previous span ends"),
        (3, {"row_stop": 21}, "episode 2, span 3 (rows 14 to 21)", "has rows outside the 20 of its stream"),
        (3, {"row_stop": 19}, "spans", "end at row 19, the record says 20"),
        (1, {"end": 1}, "episode 1, span 2 (rows 11 to 14)", "continues an episode that has ended"),
        (1, {"has_final": 1}, "episode 1, span 2 (rows 11 to 14)", "continues an episode that has ended"),
        (0, {"has_final": 2}, "episode 0, span 0 (rows 0 to 7)", "has an invalid number of final rows"),
        (0, {"end": 5}, "episode 0, span 0 (rows 0 to 7)", "has an end other than 0 to 4"),
        (2, {"env": 3}, "episode 1, span 2 (rows 11 to 14)", "is of environment 3, the previous span of 2"),
        (
            0,
            {"env": 1 << 20},
            "episode 0, span 0 (rows 0 to 7)",
            "has an episode, step or environment out of range",
        ),
        (
            0,
            {"present": 8},
            "episode 0, span 0 (rows 0 to 7)",
            "has columns that are not in the schema",
        ),
        (3, {"text_stop": 10**6}, "episode 2, span 3 (rows 14 to 20)", "has text past"),
    ],
)
def test_spans_that_no_writer_makes_are_named(
    made: Made, span: int, values: dict[str, int], named: str, what: str
) -> None:
    set_span(made, span, **values)
    problems = made.verify(fast=True).problems
    assert any(p.where == f"stream '{made.first}', {named}" and what in p.what for p in problems), problems


def test_a_return_other_than_the_sum_of_rewards_is_named(made: Made) -> None:
    def edit(block: Array) -> None:
        block[3, 0] += 0.5

    edit_array(made, made.first, "spans/floats", edit)
    (problem,) = made.verify().problems
    assert problem.where == f"stream '{made.first}', episode 2, span 3 (rows 14 to 20)"
    assert re.match(r"records a return of [\d.]+, the rewards sum to [\d.]+", problem.what)
    assert made.verify(fast=True).is_clean


def test_changed_rewards_are_named_by_the_spans_they_are_in(made: Made) -> None:
    def edit(block: Array) -> None:
        block[7] += 1  # the first row of the second episode, which has two spans

    edit_array(made, made.first, "steps/reward", edit)
    assert [p.where for p in made.verify().problems] == [f"stream '{made.first}', episode 1, span 1 (rows 7 to 11)"]


@pytest.mark.parametrize("alignment", ["action", "observation"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bfloat16", "bool"])
def test_returns_of_every_kind_of_reward_are_as_they_should_be(url: str, dtype: str, alignment: Any) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    fields = {"o": Field("float32", final=True), "reward": Field(dtype, chunk_rows=4)}
    store = trajstore.create(url, Schema(fields, reward_alignment=alignment), fsync=False)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    with store.writer(commit_seconds=None) as writer:
        for n in (1, 9, 30):
            rewards = (np.arange(n) % 7 * 1.37).astype(kind)
            writer.append_episode({"o": np.zeros(n + 1, np.float32), "reward": rewards}, terminated=True)
        writer.commit()
        for t in range(20):
            writer.append({"o": np.zeros(2, np.float32), "reward": np.array([t, t + 1]).astype(kind)}, envs=[0, 1])
            if t % 6 == 5:
                writer.commit()
    assert verify(url).problems == []


def test_rewards_that_are_not_finite_are_no_problem(url: str) -> None:
    store = trajstore.create(url, fsync=False)
    with store.writer(commit_seconds=None) as writer:
        for rewards in ([np.nan, 1], [np.inf, 1], [np.inf, -np.inf], [1e308, 1e308]):
            writer.append_episode({"o": np.zeros(2), "reward": np.array(rewards)}, terminated=True)
    assert verify(url).problems == []


def test_text_that_is_not_json_is_named(made: Made) -> None:
    def edit(block: Array) -> None:
        block[0] = ord("x")

    edit_array(made, made.first, "spans/text", edit)
    (problem,) = made.verify().problems
    assert problem.where == f"stream '{made.first}', episode 0, span 0 (rows 0 to 7)"
    assert problem.what.startswith("has text that is not JSON")


def test_text_without_a_declared_value_is_named(made: Made) -> None:
    def edit(block: Array) -> None:
        at = bytes(block).index(b"task")
        block[at] = ord("T")

    edit_array(made, made.first, "spans/text", edit)
    assert [p.what for p in made.verify().problems] == ["has no text for the episode column 'task'"]


def column_path(made: Made, name: str, array: str) -> str:
    state = read_record(made.root, made.second).columns[made.first][name]
    return next(path for path in state.paths(made.first, name) if path.endswith(array))


def test_changes_of_rows_that_are_not_there_are_named(made: Made) -> None:
    def edit(block: Array) -> None:
        block[0] = 20

    edit_array(made, made.second, column_path(made, "priority", "delta_rows"), edit)
    (problem,) = made.verify().problems
    assert problem.where == f"stream '{made.second}', column 'priority' of stream '{made.first}'"
    assert problem.what == "has rows up to 21, its stream has 20"


@pytest.mark.parametrize("value", [-1, np.nan, np.inf])
@pytest.mark.parametrize("array", ["/values", "/delta_values"])
def test_priorities_that_nothing_can_be_drawn_by_are_named(made: Made, value: float, array: str) -> None:
    def edit(block: Array) -> None:
        block[1] = value

    edit_array(made, made.second, column_path(made, "priority", array), edit)
    assert [p.what for p in made.verify().problems] == ["1 priorities are negative or not finite"]


def test_many_problems_of_one_kind_are_counted(url: str) -> None:
    store = trajstore.create(url, SCHEMA, fsync=False)
    with store.writer(commit_seconds=None) as writer:
        for number in range(50):
            writer.append_episode(steps(2, number), terminated=True)
    made = Made(Path(url), writer.stream, "", "")

    def edit(block: Array) -> None:
        block[:50, 0] += 1

    edit_array(made, writer.stream, "spans/floats", edit)
    problems = made.verify().problems
    assert len(problems) == 21
    assert "30 more of the same kind" in problems[-1].what


# ---- eviction and what is left over --------------------------------------------------------------------


def evict(made: Made, first_row: int) -> None:
    mark(made.root, read_record(made.root, made.first), first_row=first_row)


def test_chunks_below_the_first_live_row_need_not_be_there(made: Made) -> None:
    drop_checkpoint(made)
    evict(made, 9)
    for index in (0, 1):
        made.chunk("steps/f", index).unlink()
    report = made.verify()
    assert report.problems == []
    where = {note.where.split("array ")[1]: note.what for note in report.notes}
    assert where["'steps/o/x'"] == "objects below row 9, evicted and not deleted yet: 2"
    assert where["'steps/reward'"] == "objects below row 9, evicted and not deleted yet: 1"
    assert "'steps/f'" not in where
    made.chunk("steps/f", 2).unlink()
    assert [p.where for p in made.verify().problems] == [
        f"stream '{made.first}', array 'steps/f', chunk 2 (rows 8 to 12)"
    ]


def test_chunks_that_a_checkpoint_keeps_must_be_there(made: Made) -> None:
    evict(made, 9)
    assert made.verify().problems == []
    made.chunk("steps/f", 0).unlink()
    assert [p.where for p in made.verify().problems] == [
        f"stream '{made.first}', array 'steps/f', chunk 0 (rows 0 to 4)"
    ]


def test_what_is_evicted_while_it_is_looked_at_is_no_problem(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    drop_checkpoint(made)
    original = LocalStorage.get_into

    def get_into(self: LocalStorage, key: str, buffer: bytearray) -> memoryview:
        if key.endswith("steps/f/c.1.0"):
            evict(made, 9)
            for index in (0, 1):
                made.chunk("steps/f", index).unlink(missing_ok=True)
        return original(self, key, buffer)

    monkeypatch.setattr(LocalStorage, "get_into", get_into)
    assert made.verify().problems == []
    assert not made.chunk("steps/f", 1).exists()


def test_leftovers_are_noted(made: Made) -> None:
    (made.root / "scratch" / "1-2-3.tmp").write_text("x")
    (made.root / "thesis.tex").write_text("x")
    (made.root / "streams" / "README").write_text("x")
    (made.root / "streams" / made.first / "more").mkdir()
    (made.root / "streams" / made.first / "steps" / "f" / "notes.txt").write_text("x")
    shutil.copy(made.chunk("steps/f", 0), made.chunk("steps/f", 5))
    report = made.verify()
    assert report.problems == []
    notes = {str(note) for note in report.notes}
    stream = f"stream '{made.first}'"
    assert notes == {
        "scratch: 1 temporary files, of running writers or of writers that died",
        "thesis.tex: not part of a store; readers ignore it",
        "streams/README: not a stream; readers ignore it",
        f"{stream}: 'more' is not named by the record; readers ignore it",
        f"{stream}, array 'steps/f': 'notes.txt' is not a chunk; readers ignore it",
        f"{stream}, array 'steps/f': objects past its 20 rows, of an unfinished commit: 1",
    }


def test_a_stream_that_was_being_removed_is_noted(made: Made) -> None:
    drop_checkpoint(made)
    record = read_record(made.root, made.second)
    mark(made.root, record, view=SessionView({made.first: 20}), columns={},
         layouts={p: a for p, a in record.layouts.items() if not p.startswith("columns/")})  # fmt: skip
    (made.root / "streams" / made.first / "zarr.json").unlink()
    report = made.verify()
    assert report.problems == []
    assert any(note.where == f"stream '{made.first}', commit record" for note in report.notes)


# ---- checkpoints ---------------------------------------------------------------------------------------


def append_more(made: Made) -> str:
    """A third stream, that no checkpoint has."""
    with trajstore.open(made.root, fsync=False).writer("third", commit_seconds=None) as writer:
        writer.append_episode(steps(9, 4), terminated=True)
    return writer.stream


def test_at_a_checkpoint_only_what_it_shows_is_looked_at(made: Made) -> None:
    third = append_more(made)
    (made.root / "streams" / third / "steps/f/c.0.0").unlink()
    (made.root / "streams" / third / "zarr.json").write_text("{}")
    assert not made.verify().is_clean
    report = made.verify(at="c")
    assert (report.problems, report.counts["rows"], report.counts["episodes"]) == ([], 24, 4)
    made.chunk("steps/f", 3).unlink()
    assert [p.where for p in made.verify(at=made.checkpoint).problems] == [
        f"stream '{made.first}', array 'steps/f', chunk 3 (rows 12 to 16)"
    ]


def test_what_was_written_after_a_checkpoint_is_not_left_over_from_it(url: str) -> None:
    store = trajstore.create(url, SCHEMA, fsync=False)
    with store.writer(commit_seconds=None) as writer:
        writer.append_episode(steps(6, 0), terminated=True)
        writer.commit()
        cut = Checkpoint(new_checkpoint_id("c"), "c", 1.0, streams=store.refresh().cuts())
        save(store.snapshot.storage, cut, STATE)
        writer.append_episode(steps(30, 1), terminated=True)
    report = verify(url, at="c")
    assert (report.problems, report.notes, report.counts["rows"]) == ([], [], 6)


def test_a_checkpoint_of_rows_that_a_stream_does_not_have_is_a_problem(made: Made) -> None:
    storage = trajstore.open(made.root).snapshot.storage
    cuts = trajstore.open(made.root).snapshot.cuts()
    longer = {stream: replace(cut, stop=cut.stop + 1, record=None) for stream, cut in cuts.items()}
    longer[new_id("lost")] = replace(next(iter(cuts.values())), record=None)
    saved = save(storage, Checkpoint(new_checkpoint_id("d"), "d", 2.0, streams=longer), {})
    problems = made.verify().problems
    assert len(problems) == 3
    assert all(p.where.startswith(f"checkpoint '{saved.id}', stream '") for p in problems)


def test_a_checkpoint_that_describes_other_arrays_than_the_stream_is_a_problem(made: Made) -> None:
    rewrite(made.root, made.first, chunks_per_shard=2)
    (problem,) = made.verify().problems
    assert problem.where == f"checkpoint '{made.checkpoint}', stream '{made.first}'"
    assert problem.what == "its copy of the commit record describes other arrays"


def test_a_checkpoint_that_is_not_complete_is_noted(made: Made) -> None:
    storage = trajstore.open(made.root).snapshot.storage

    def stop() -> None:
        shutil.copytree(made.root / "checkpoints", made.root / "kept")
        raise CorruptionError("stop")

    with pytest.raises(CorruptionError, match="stop"):
        save(storage, Checkpoint(new_checkpoint_id("d"), "d", 2.0), STATE, check=stop)
    shutil.rmtree(made.root / "checkpoints")
    (made.root / "kept").rename(made.root / "checkpoints")
    report = made.verify()
    assert report.problems == []
    assert any("not complete" in note.what for note in report.notes)


def test_an_unknown_checkpoint_is_an_error(made: Made) -> None:
    with pytest.raises(trajstore.TrajstoreError, match="no checkpoint 'nothing'"):
        made.verify(at="nothing")


# ---- progress and memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [False, True])
def test_progress_reaches_the_number_of_chunks(made: Made, fast: bool) -> None:
    seen: list[tuple[int, int]] = []
    report = made.verify(fast=fast, progress=lambda n, total: seen.append((n, total)))
    assert seen[-1] == (report.counts["chunks"], report.counts["chunks"])
    assert [n for n, _ in seen] == sorted(n for n, _ in seen)
    assert all(n <= total for n, total in seen)


def test_chunks_are_read_ahead_within_bounded_memory(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"x": Field("uint8", (1 << 20,), chunk_rows=8, codec="zstd:1"), "reward": Field("float32")}
    store = trajstore.create(url, Schema(fields), fsync=False)
    with store.writer(commit_seconds=None) as writer:
        data = {"x": np.zeros((100, 1 << 20), np.uint8), "reward": np.zeros(100, np.float32)}
        writer.append_episode(data, terminated=True)
    ahead: list[tuple[int, int]] = []
    original = LocalStorage.map_ahead

    def record(self: LocalStorage, function: Any, items: Any, n_ahead: int) -> Any:
        ahead.append((len(items), n_ahead))
        return original(self, function, items, n_ahead)

    monkeypatch.setattr(LocalStorage, "map_ahead", record)
    assert verify(url).problems == []
    assert (13, 8) in ahead  # 8 MiB each
    assert max(n for _, n in ahead) == 16


def test_a_report_can_be_told_as_json(made: Made) -> None:
    flip(made.chunk("steps/f", 1))
    told = json.loads(json.dumps(asdict(made.verify())))
    assert told["problems"][0]["what"] == "checksum does not match"
