"""Stores that are foreign, damaged or made to harm: errors say so, nothing else happens."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from tests.support.sharding import read_record
from trajstore import (
    CorruptionError,
    Field,
    FormatError,
    Schema,
    StoreExistsError,
    StoreNotFoundError,
    TrajstoreError,
)
from trajstore.format.ids import new_id
from trajstore.schema import flatten

MAX_PEAK_BYTES = 64 << 20
SCHEMA = Schema(
    {
        "o": {"x": Field("float32", (2,), final=True, chunk_rows=4)},
        "f": Field("uint8", (3,), chunk_rows=4),
        "reward": Field("float64", chunk_rows=8, codec="none"),
    },
    episode={"seed": int, "task": str},
)


def build(root: Path) -> str:
    store = trajstore.create(root, SCHEMA, fsync=False)
    rng = np.random.default_rng(0)
    with store.writer() as writer:
        for n in (3, 5):
            x, f = rng.random((n + 1, 2), np.float32), rng.integers(0, 256, (n, 3), np.uint8)
            data = {"o": {"x": x}, "f": f, "reward": rng.random(n)}
            writer.append_episode(data, terminated=True, metadata={"seed": n, "task": "t", "note": "é"})
    return writer.stream


def use(root: Path) -> list[Any]:
    """Open the store and read all there is."""
    store = trajstore.open(root)
    return [
        (repr(row), [(path, v.tobytes()) for path, v in flatten(store.read_episode(i)).items()])
        for i, row in enumerate(store.episodes)
    ]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    root = tmp_path_factory.mktemp("hostile") / "store"
    return root, build(root)


@pytest.fixture
def store(template: tuple[Path, str], tmp_path: Path) -> tuple[Path, str]:
    """A fresh copy of a small store, and the id of its one stream."""
    root = tmp_path / "inner" / "store"
    shutil.copytree(template[0], root)
    return root, template[1]


def record_file(store: tuple[Path, str]) -> Path:
    return store[0] / "streams" / store[1] / "zarr.json"


def chunk_objects(root: Path) -> list[Path]:
    return sorted(root.glob("streams/*/*/**/c.*"))


def edit_json(file: Path, edit: Callable[[Any], None]) -> None:
    data = json.loads(file.read_bytes())
    edit(data)
    file.write_text(resealed(json.dumps(data)))


def resealed(text: str) -> str:
    """The text with the checksum that it should have, so that it is read further."""
    blank = re.sub(r'"crc32c": ?"[0-9a-f]{8}"', '"crc32c":"00000000"', text, count=1)
    return blank.replace('"crc32c":"00000000"', f'"crc32c":"{crc32c.crc32c(blank.encode()):08x}"', 1)


def with_crc(body: bytes) -> bytes:
    return body + crc32c.crc32c(body).to_bytes(4, "little")


# ---- not a store of ours -------------------------------------------------------------------------------


def test_a_place_with_nothing_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="there is no store here"):
        trajstore.open(tmp_path / "nothing")


def test_a_foreign_directory_is_not_found_and_not_taken(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(StoreNotFoundError):
        trajstore.open(tmp_path)
    with pytest.raises(StoreExistsError, match="not empty and not a store"):
        trajstore.create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_plain_file_is_not_a_store(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(StoreNotFoundError):
        trajstore.open(file)


@pytest.mark.parametrize("attributes", [{}, {"trajstore": 1}, {"trajstore": {"format": 1, "kind": "stream"}}])
def test_a_foreign_zarr_group_is_refused(tmp_path: Path, attributes: dict[str, Any]) -> None:
    zarr.create_group(tmp_path / "g", attributes=attributes)
    with pytest.raises(FormatError):
        trajstore.open(tmp_path / "g")


def test_a_zarr_array_is_refused(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a", shape=(3,), dtype="int32")
    with pytest.raises(FormatError, match="not part of a trajstore store"):
        trajstore.open(tmp_path / "a")


@pytest.mark.parametrize("key", ["zarr.json", "schema/zarr.json", "record"])
@pytest.mark.parametrize("version", [2, 99, "1", None, -1])
def test_another_format_asks_for_an_upgrade(store: tuple[Path, str], key: str, version: Any) -> None:
    file = record_file(store) if key == "record" else store[0] / key
    edit_json(file, lambda data: data["attributes"]["trajstore"].update(format=version))
    with pytest.raises(FormatError, match="this trajstore reads format 1; upgrade trajstore"):
        trajstore.open(store[0])


@pytest.mark.parametrize("name", ["..x", ".hidden", "notes.txt", "writer", "writer-tooshort", "x" * 200])
@pytest.mark.parametrize("is_directory", [True, False])
def test_junk_beside_the_streams_is_ignored(store: tuple[Path, str], name: str, is_directory: bool) -> None:
    before, junk = use(store[0]), store[0] / "streams" / name
    if is_directory:
        junk.mkdir()
        (junk / "zarr.json").write_text("{}")
    else:
        junk.write_text("junk")
    assert use(store[0]) == before


@pytest.mark.parametrize("is_directory", [True, False])
def test_junk_named_like_a_stream_is_ignored(store: tuple[Path, str], is_directory: bool) -> None:
    before, junk = use(store[0]), store[0] / "streams" / new_id("writer")
    junk.mkdir() if is_directory else junk.write_text("junk")
    assert use(store[0]) == before


# ---- metadata cut short --------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["zarr.json", "schema/zarr.json", "record"])
def test_metadata_cut_at_any_length_is_refused(store: tuple[Path, str], key: str) -> None:
    file = record_file(store) if key == "record" else store[0] / key
    data = file.read_bytes()
    for length in range(len(data)):
        file.write_bytes(data[:length])
        with pytest.raises(FormatError):
            trajstore.open(store[0])


def test_without_its_root_a_store_is_not_found(store: tuple[Path, str]) -> None:
    (store[0] / "zarr.json").unlink()
    with pytest.raises(StoreNotFoundError):
        trajstore.open(store[0])


def test_without_its_record_a_stream_does_not_exist(store: tuple[Path, str]) -> None:
    record_file(store).unlink()
    assert use(store[0]) == []


# ---- metadata made to harm -----------------------------------------------------------------------------

DEEP = "@deep-{}@"
BAD = [
    None, True, False, 0, 1, -1, 2, 3, 1 << 31, 1 << 62, 1 << 63, -(1 << 63), 10**30, 1.5, 1e308, "", "x",
    "../../etc", "/etc/passwd", "..", "a/../../b", "x\x00y", "\ud7ff", "c" * 300, [], [[]], [0], [-1], [1 << 40],
    ["../../etc"], {}, {"": 0}, {"../x": 1}, {"name": "zstd"}, {"name": "../x"}, DEEP.format(50),
    DEEP.format(900), DEEP.format(100_000),
]  # fmt: skip


def dump(data: Any) -> str:
    """JSON text, with lists nested as deep as the marks in it say."""
    text = json.dumps(data)
    for depth in (50, 900, 100_000):
        text = text.replace(json.dumps(DEEP.format(depth)), "[" * depth + "]" * depth)
    return text


def paths_of(data: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of a JSON tree stands."""
    children = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in children:
        yield (*prefix, key)
        yield from paths_of(value, (*prefix, key))


def replaced(data: Any, path: tuple[Any, ...], value: Any) -> None:
    with contextlib.suppress(KeyError, IndexError, TypeError):  # an earlier change took the place away
        for key in path[:-1]:
            data = data[key]
        if isinstance(data, (dict, list)):
            data[path[-1]] = copy.deepcopy(value)  # a later change may reach into it


opened: list[str] = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event in ("open", "os.listdir") else None)


def is_outside(path: str, root: Path) -> bool:
    """Whether a path leads from the store to where only an escape would: its neighbourhood, or the bait."""
    real = Path(os.path.realpath(path))
    return real == Path("/etc/passwd") or (real.is_relative_to(root.parents[1]) and not real.is_relative_to(root))


def assert_harmless(root: Path) -> None:
    """Using the store works or is refused; nothing outside it is opened or made."""
    opened.clear()
    with contextlib.suppress(TrajstoreError):
        use(root)
    assert opened, "the audit hook sees nothing"
    assert not [path for path in opened if is_outside(path, root)]
    assert [path.name for path in root.parent.iterdir()] == [root.name]


many = settings(
    deadline=None,
    max_examples=400,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@given(data=st.data())
@many
def test_any_change_to_a_record_is_refused_or_harmless(store: tuple[Path, str], data: st.DataObject) -> None:
    file = record_file(store)
    good = file.read_bytes()
    tree = json.loads(good)
    places = list(paths_of(tree))
    for _ in range(data.draw(st.integers(1, 2))):
        replaced(tree, data.draw(st.sampled_from(places)), data.draw(st.sampled_from(BAD)))
    try:
        file.write_text(resealed(dump(tree)))
        assert_harmless(store[0])
    finally:
        file.write_bytes(good)


@pytest.mark.parametrize("key", ["zarr.json", "schema/zarr.json"])
def test_any_change_to_root_or_schema_is_refused_or_harmless(store: tuple[Path, str], key: str) -> None:
    file = store[0] / key
    good = json.loads(file.read_bytes())
    for path in paths_of(good):
        for value in BAD:
            tree = json.loads(json.dumps(good))
            replaced(tree, path, value)
            file.write_text(resealed(dump(tree)))
            assert_harmless(store[0])


def nodes_of(record: Any) -> Any:
    return record["consolidated_metadata"]["metadata"]


def claim_rows(record: Any) -> None:
    record["attributes"]["trajstore"]["rows"] = 1 << 40
    for path, node in nodes_of(record).items():
        if path.startswith("steps/") and node["node_type"] == "array":
            node["shape"][0] = 1 << 40


def claim_spans(record: Any) -> None:
    record["attributes"]["trajstore"]["spans"] = 1 << 40
    for name in ("ints", "floats"):
        nodes_of(record)[f"spans/{name}"]["shape"][0] = 1 << 40


def claim_text(record: Any) -> None:
    record["attributes"]["trajstore"]["text_bytes"] = 1 << 40
    nodes_of(record)["spans/text"]["shape"][0] = 1 << 40


def claim_chunk_rows(record: Any) -> None:
    for node in nodes_of(record).values():
        if node["node_type"] == "array":
            row_bytes = int(np.prod(node["shape"][1:])) * np.dtype(node["data_type"]).itemsize
            node["chunk_grid"]["configuration"]["chunk_shape"][0] = (1 << 30) // row_bytes


def claim_row_shape(record: Any) -> None:
    record["attributes"]["trajstore"]["schema"]["fields"]["f"]["shape"] = [1 << 29]
    node = nodes_of(record)["steps/f"]
    node["shape"][1:] = [1 << 29]
    node["chunk_grid"]["configuration"]["chunk_shape"] = [1, 1 << 29]


@pytest.mark.parametrize("claim", [claim_rows, claim_spans, claim_text, claim_chunk_rows, claim_row_shape])
def test_absurd_sizes_allocate_nothing(store: tuple[Path, str], claim: Callable[[Any], None]) -> None:
    edit_json(record_file(store), claim)
    if claim is claim_row_shape:
        (store[0] / "schema/zarr.json").unlink()  # else the record is refused for its schema
    tracemalloc.start()
    try:
        with contextlib.suppress(TrajstoreError):
            use(store[0])
        assert tracemalloc.get_traced_memory()[1] < MAX_PEAK_BYTES
    finally:
        tracemalloc.stop()


def forge(store: tuple[Path, str], path: str, edit: Callable[[Any], None]) -> None:
    """Change values in the first chunk of an array, with a right checksum."""
    layout = read_record(*store).layouts[path]
    file = store[0] / "streams" / store[1] / path / layout.chunk_key(0)
    block = layout.empty_chunk()
    layout.decode(file.read_bytes(), block)
    edit(block)
    file.write_bytes(layout.encode(block))


EXTREMES = [-(1 << 63), -1, 0, 1, 2, 5, 100, 1 << 40, (1 << 63) - 1]


@pytest.mark.parametrize("column", range(10))
def test_forged_spans_are_refused_or_harmless(store: tuple[Path, str], column: int) -> None:
    file = next((store[0] / "streams" / store[1] / "spans/ints").glob("c.*"))
    good = file.read_bytes()
    for row in (0, 1):
        for value in EXTREMES:
            forge(store, "spans/ints", lambda block: block.__setitem__((row, column), value))  # noqa: B023
            assert_harmless(store[0])
            file.write_bytes(good)


def test_spans_that_share_rows_are_refused(store: tuple[Path, str]) -> None:
    def share(ints: Any) -> None:  # with many such spans, a small store would ask for any amount of memory
        ints[:2, 0], ints[:2, 3], ints[:2, 4] = 0, 0, read_record(*store).rows

    forge(store, "spans/ints", share)
    with pytest.raises(CorruptionError):
        use(store[0])


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff\xfe", b"1e999", b"[" * 60])
def test_forged_text_is_corruption(store: tuple[Path, str], text: bytes) -> None:
    def put(block: Any) -> None:
        size = read_record(*store).text_bytes
        block[:size] = np.frombuffer(text.ljust(size)[:size], np.uint8)

    forge(store, "spans/text", put)
    with pytest.raises(CorruptionError):
        use(store[0])


# ---- damaged chunks ------------------------------------------------------------------------------------


def test_every_flipped_byte_of_every_chunk_is_corruption(store: tuple[Path, str]) -> None:
    for file in chunk_objects(store[0]):
        good = file.read_bytes()
        for at in range(len(good)):
            file.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
            with pytest.raises(CorruptionError):
                use(store[0])
        file.write_bytes(good)


def test_a_flipped_byte_of_metadata_is_refused_or_leaves_the_data_as_it_is(store: tuple[Path, str]) -> None:
    before, harmful = use(store[0]), []
    for file in (store[0] / "zarr.json", store[0] / "schema/zarr.json", record_file(store)):
        good = file.read_bytes()
        for at in range(len(good)):
            file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            with contextlib.suppress(TrajstoreError):
                if use(store[0]) != before:
                    harmful.append((file.parent.name, good[max(0, at - 20) : at + 10]))
        file.write_bytes(good)
    assert harmful == []


def test_array_nodes_are_for_others_and_never_read(store: tuple[Path, str]) -> None:
    before = use(store[0])
    for node in record_file(store).parent.glob("*/**/zarr.json"):
        node.write_text("junk")
    assert use(store[0]) == before


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, -1])
def test_a_chunk_cut_short_is_corruption(store: tuple[Path, str], cut: int) -> None:
    for file in chunk_objects(store[0]):
        good = file.read_bytes()
        file.write_bytes(good[:cut])
        with pytest.raises(CorruptionError, match=file.parent.name):
            use(store[0])
        file.write_bytes(good)


def test_a_chunk_with_more_behind_it_is_corruption(store: tuple[Path, str]) -> None:
    for file in chunk_objects(store[0]):
        good = file.read_bytes()
        for longer in (good + b"\0", good + good, with_crc(good[:-4] + b"\0" * 8)):
            file.write_bytes(longer)
            with pytest.raises(CorruptionError):
                use(store[0])
        file.write_bytes(good)


def test_a_chunk_of_another_array_is_corruption(store: tuple[Path, str]) -> None:
    stream = store[0] / "streams" / store[1]
    names = ("steps/o/x/c.0.0", "steps/f/c.0.0", "steps/reward/c.0", "spans/ints/c.0.0", "spans/text/c.0")
    chunks = {name: (stream / name).read_bytes() for name in names}
    for target in names:
        for source in names:
            (stream / target).write_bytes(chunks[source])
            if source != target:
                with pytest.raises(CorruptionError):
                    use(store[0])
        (stream / target).write_bytes(chunks[target])


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 4096])
@pytest.mark.parametrize("path", ["steps/o/x", "steps/f", "steps/reward"])
def test_a_chunk_of_another_size_is_corruption(store: tuple[Path, str], path: str, rows: int) -> None:
    layout = read_record(*store).layouts[path]
    if rows == layout.chunk_rows:
        rows += 1
    other = np.zeros((rows, *layout.row_shape), layout.dtype)
    (store[0] / "streams" / store[1] / path / layout.chunk_key(0)).write_bytes(layout.codec.encode(other))
    with pytest.raises(CorruptionError, match=r"holds|decoded"):
        use(store[0])


# In a process of its own: a codec that trusts a header would end it, and with it the tests.
LYING = """
import crc32c, numpy as np
from trajstore.format.array_layout import Codec
from trajstore.errors import CorruptionError

def attempt(codec, body):
    out = np.zeros(4096, np.uint8)
    try:
        codec.decode(body + crc32c.crc32c(bytes(body)).to_bytes(4, "little"), out)
    except CorruptionError:
        return True
    return False

rng = np.random.default_rng(0)
block = np.repeat(rng.integers(0, 256, 512, np.uint8), 8)
sizes = [0, 1, 15, 16, 4095, 4097, 65536, 2**31 - 1, 2**31, 2**32 - 1]
for text in ("blosc-lz4", "blosc-zstd", "blosc-lz4:0", "zstd", "zstd:19"):
    codec = Codec.parse(text)
    good = codec.encode(block)[:-4]
    assert not attempt(codec, good)
    if codec.name == "blosc":
        for at in (4, 12):
            for size in sizes:
                body = good[:at] + size.to_bytes(4, "little") + good[at + 4:]
                assert attempt(codec, body), (text, at, size)
        for at in (8, 16):
            for size in sizes:
                attempt(codec, good[:at] + size.to_bytes(4, "little") + good[at + 4:])
    else:
        width = {0: 1, 1: 2, 2: 4, 3: 8}[good[4] >> 6]
        start = 5 + (not good[4] & 0x20)
        for size in [*sizes, 2**63, 2**64 - 1]:
            body = good[:start] + size.to_bytes(8, "little")[:width] + good[start + width:]
            assert body == good or attempt(codec, body), (text, size)
        for flag in range(4):  # another width of the size, so that it reads as something else
            attempt(codec, good[:4] + bytes([flag << 6 | good[4] & 0x3F]) + good[5:])
    for length in range(len(good)):
        assert attempt(codec, good[:length]), (text, length)
    for _ in range(4000):
        body = bytearray(good)
        for at in rng.integers(0, min(len(good), 64), rng.integers(1, 4)):
            body[at] = rng.integers(0, 256)
        attempt(codec, bytes(body))
print("survived")
"""


def test_codec_headers_that_lie_are_corruption_and_never_a_crash() -> None:
    found = subprocess.run([sys.executable, "-c", LYING], capture_output=True, text=True, timeout=300)
    assert (found.returncode, found.stdout) == (0, "survived\n"), found.stderr[-2000:]
