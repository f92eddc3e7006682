"""A test class that checks what trajstore needs from a storage backend.

The author of a backend subclasses `StorageConformance` in a test module, and pytest runs the inherited tests.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest

from trajstore.storage import ABSENT, Put, Storage, open_storage

_MEGABYTE = 1_000_000
_JOIN_S = 120


class StorageConformance:
    """Tests of a storage backend. Subclass it in a test module and define a ``storage`` fixture.

    The fixture returns a new, empty `Storage` for every test. The tests put, get, list, copy and delete objects,
    also from several threads and processes at once.

    Example:
        >>> class TestMyStorage(StorageConformance):
        ...     @pytest.fixture
        ...     def storage(self, tmp_path):
        ...         return open_storage(tmp_path / "store")

    Attributes:
        is_per_process: Set it to True if the objects exist in one process only, as in memory. The tests that need
            a second process are then skipped.
    """

    is_per_process: bool = False

    @pytest.fixture
    def storage(self) -> Storage:
        raise NotImplementedError("define a 'storage' fixture in the subclass")

    def reopen(self, storage: Storage) -> Storage:
        """Return a second storage object at the same URL, as another process would get it (by pickling)."""
        copy: Storage = ForkingPickler.loads(bytes(ForkingPickler.dumps(storage)))
        return copy

    # ---- one object --------------------------------------------------------------------------------

    @pytest.mark.parametrize("n_bytes", [0, 1, 5 * _MEGABYTE])
    def test_get_returns_exactly_what_was_put(self, storage: Storage, n_bytes: int) -> None:
        data = _make_bytes(n_bytes)
        storage.put("a/object", data)
        assert storage.get("a/object") == data

    def test_a_missing_object_is_a_file_not_found_error(self, storage: Storage) -> None:
        for read in (storage.get, storage.size, lambda key: storage.get_range(key, 0, 1)):
            with pytest.raises(FileNotFoundError):
                read("never/put")

    def test_a_second_put_replaces_the_object_whole(self, storage: Storage) -> None:
        storage.put("key", b"long " * 1000)
        storage.put("key", b"short")
        assert storage.get("key") == b"short"

    @pytest.mark.parametrize(("start", "stop"), [(0, 1000), (3, 10), (999, 1000), (990, 5000)])
    def test_a_range_holds_the_bytes_from_start_to_stop(self, storage: Storage, start: int, stop: int) -> None:
        data = _make_bytes(1000)
        storage.put("key", data)
        assert storage.get_range("key", start, stop) == data[start:stop]

    @pytest.mark.parametrize("n_bytes", [0, 1, 12_345])
    def test_size_counts_the_bytes(self, storage: Storage, n_bytes: int) -> None:
        storage.put("key", _make_bytes(n_bytes))
        assert storage.size("key") == n_bytes

    def test_size_follows_a_put_by_another_storage_object(self, storage: Storage) -> None:
        storage.put("key", b"one")
        assert storage.size("key") == 3
        self.reopen(storage).put("key", b"three")
        assert storage.size("key") == 5

    def test_delete_removes_the_object(self, storage: Storage) -> None:
        storage.put("a/gone", b"1")
        storage.put("a/stays", b"2")
        storage.delete(["a/gone"])
        assert storage.list_names("a") == ["stays"]
        with pytest.raises(FileNotFoundError):
            storage.get("a/gone")

    def test_deleting_a_missing_object_does_nothing(self, storage: Storage) -> None:
        storage.put("key", b"1")
        storage.delete(["key", "never"])
        storage.delete(["key", "never"])
        assert storage.list_names("key") == []

    @pytest.mark.parametrize("key", ["../x", "/x", "a/../../x", ".."])
    def test_a_key_that_leaves_the_store_is_refused(self, storage: Storage, key: str) -> None:
        storage.put("there", b"1")
        actions: list[Callable[[], object]] = [
            lambda: storage.get(key),
            lambda: storage.put(key, b"data"),
            lambda: storage.get_range(key, 0, 1),
            lambda: storage.size(key),
            lambda: storage.list_names(key),
            lambda: storage.delete([key]),
            lambda: storage.list_tree(key),
            lambda: storage.tree_sizes(key),
            lambda: storage.remove_tree(key),
            lambda: storage.copy(key, storage, "there"),
            lambda: storage.copy("there", storage, key, may_link=True),
        ]
        for action in actions:
            with pytest.raises(ValueError, match="leaves the store"):
                action()

    # ---- listing -----------------------------------------------------------------------------------

    def test_listing_names_only_direct_children_in_order(self, storage: Storage) -> None:
        for key in ("p/b", "p/a/deep/er", "p/c", "p/a/x", "pq/x", "q"):
            storage.put(key, b"1")
        assert storage.list_names("p") == ["a", "b", "c"]

    def test_a_child_may_be_called_like_its_parent(self, storage: Storage) -> None:
        storage.put("p/p/x", b"1")
        assert storage.list_names("p") == ["p"]
        assert storage.list_names("p/p") == ["x"]

    def test_listing_the_root_names_the_top_level(self, storage: Storage) -> None:
        storage.put("a", b"1")
        storage.put("b/c", b"2")
        assert {"a", "b"} <= set(storage.list_names(""))
        assert "c" not in storage.list_names("")

    def test_an_empty_prefix_lists_nothing(self, storage: Storage) -> None:
        assert storage.list_names("nothing/here") == []

    def test_the_root_of_an_empty_storage_lists_nothing(self, storage: Storage) -> None:
        assert storage.list_names("") == []

    def test_listing_sees_a_put_made_through_another_storage_object(self, storage: Storage) -> None:
        storage.put("p/a", b"1")
        assert storage.list_names("p") == ["a"]
        _in_thread(lambda: self.reopen(storage).put("p/b", b"2"))
        assert storage.list_names("p") == ["a", "b"]

    # ---- trees -------------------------------------------------------------------------------------

    def test_a_tree_names_every_object_below_a_prefix_with_its_size(self, storage: Storage) -> None:
        for i, key in enumerate(("p/b", "p/a/deep/er", "p/a/x", "p/a.b", "pq/x", "q", "x/p/b")):
            storage.put(key, bytes(i))
        assert storage.tree_sizes("p") == {"p/b": 0, "p/a/deep/er": 1, "p/a/x": 2, "p/a.b": 3}
        assert storage.list_tree("p") == ["p/a.b", "p/a/deep/er", "p/a/x", "p/b"]
        assert storage.list_tree("p/a") == ["p/a/deep/er", "p/a/x"]

    def test_the_tree_of_nothing_or_of_an_object_is_empty(self, storage: Storage) -> None:
        storage.put("p/a", b"1")
        assert storage.list_tree("nothing/here") == []
        assert storage.list_tree("p/a") == []
        assert storage.list_tree("p/a/b") == []

    def test_a_tree_shows_a_put_made_through_another_storage_object(self, storage: Storage) -> None:
        storage.put("p/a/x", b"1")
        assert storage.list_tree("p") == ["p/a/x"]
        _in_thread(lambda: self.reopen(storage).put("p/b/y", b"22"))
        _in_thread(lambda: self.reopen(storage).put("p/a/x", b"333"))
        assert storage.tree_sizes("p") == {"p/a/x": 3, "p/b/y": 2}

    def test_removing_a_tree_removes_all_below_the_prefix_and_nothing_beside_it(self, storage: Storage) -> None:
        for key in ("p/a/zarr.json", "p/a/x/y/z", "p/a/x/c.0", "p/ab/zarr.json", "p/zarr.json"):
            storage.put(key, b"1")
        storage.remove_tree("p/a")
        assert storage.list_tree("p") == ["p/ab/zarr.json", "p/zarr.json"]
        assert "a" not in storage.list_names("p")
        with pytest.raises(FileNotFoundError):
            storage.get("p/a/x/c.0")

    def test_a_removed_tree_may_be_removed_and_put_again(self, storage: Storage) -> None:
        storage.remove_tree("never/put")
        storage.put("p/a/zarr.json", b"1")
        storage.remove_tree("p/a")
        storage.remove_tree("p/a")
        storage.put("p/a/zarr.json", b"2", ABSENT)
        assert storage.list_tree("p") == ["p/a/zarr.json"]

    @pytest.mark.parametrize("prefix", ["", ".", "./", "./."])
    def test_the_tree_of_everything_is_not_removed(self, storage: Storage, prefix: str) -> None:
        storage.put("a", b"1")
        with pytest.raises(ValueError, match="not all of it"):
            storage.remove_tree(prefix)
        assert storage.get("a") == b"1"

    # ---- copies ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("may_link", [False, True])
    def test_a_copy_holds_the_same_bytes_and_replaces_an_existing_object(
        self, storage: Storage, may_link: bool
    ) -> None:
        storage.put("a/x", _make_bytes(100_000))
        storage.put("b/old", b"old")
        for key in ("b/y", "b/y", "b/old", "new/directories/z"):
            storage.copy("a/x", self.reopen(storage), key, may_link=may_link)
            assert storage.get(key) == _make_bytes(100_000)
        assert storage.list_tree("b") == ["b/old", "b/y"]

    @pytest.mark.parametrize("may_link", [False, True])
    def test_a_copy_stays_when_the_original_is_replaced_or_deleted(self, storage: Storage, may_link: bool) -> None:
        storage.put("x", b"first")
        storage.copy("x", storage, "y", may_link=may_link)
        storage.put("x", b"second")
        assert storage.get("y") == b"first"
        storage.copy("x", storage, "y", may_link=may_link)
        storage.delete(["x"])
        assert storage.get("y") == b"second"

    @pytest.mark.parametrize("may_link", [False, True])
    def test_copying_a_missing_object_is_a_file_not_found_error(self, storage: Storage, may_link: bool) -> None:
        storage.put("y", b"1")
        with pytest.raises(FileNotFoundError):
            storage.copy("x", storage, "y", may_link=may_link)
        assert storage.get("y") == b"1"

    @pytest.mark.parametrize("may_link", [False, True])
    def test_a_wave_of_copies_makes_every_object(self, storage: Storage, may_link: bool) -> None:
        wave = [(f"from/{i}", f"to/{i}/x") for i in range(40)]
        for i, (source, _) in enumerate(wave):
            storage.put(source, _make_bytes(i))
        storage.copy_many(wave, self.reopen(storage), may_link=may_link)
        assert storage.get_many([key for _, key in wave]) == [_make_bytes(i) for i in range(40)]
        assert set(storage.list_names("")) <= {"from", "to", "scratch"}

    @pytest.mark.parametrize("is_target", [False, True])
    def test_copies_go_from_and_to_storages_of_another_kind(
        self, storage: Storage, tmp_path: Path, is_target: bool
    ) -> None:
        directory = open_storage(tmp_path / "another kind")
        source, target = (directory, storage) if is_target else (storage, directory)
        wave = {f"k{i}": _make_bytes(1000 + i) for i in range(20)}
        source.put_many([Put(key, lambda data=data: data) for key, data in wave.items()])  # type: ignore[misc]
        source.copy_many([(key, f"p/{key}") for key in wave], target, may_link=True)
        assert target.get_many([f"p/{key}" for key in wave]) == list(wave.values())
        with pytest.raises(FileNotFoundError):
            source.copy("nothing", target, "p/nothing", may_link=True)
        assert "nothing" not in target.list_names("p")

    # ---- conditional puts --------------------------------------------------------------------------

    def test_a_put_that_expects_the_last_version_replaces(self, storage: Storage) -> None:
        version = storage.put("key", b"one", ABSENT)
        version = storage.put("key", b"two", version)
        storage.put("key", b"three", version)
        assert storage.get("key") == b"three"

    def test_an_exclusive_put_leaves_an_existing_object_unchanged(self, storage: Storage) -> None:
        storage.put("key", b"first", ABSENT)
        with pytest.raises(FileExistsError):
            storage.put("key", b"second", ABSENT)
        assert storage.get("key") == b"first"

    def test_an_exclusive_put_of_the_same_bytes_again_does_no_harm(self, storage: Storage) -> None:
        storage.put("key", b"same", ABSENT)
        with contextlib.suppress(FileExistsError):  # a retry after a lost answer may also succeed
            storage.put("key", b"same", ABSENT)
        assert storage.get("key") == b"same"

    def test_an_exclusive_put_works_again_after_a_delete(self, storage: Storage) -> None:
        storage.put("key", b"first", ABSENT)
        storage.delete(["key"])
        storage.put("key", b"second", ABSENT)
        assert storage.get("key") == b"second"

    def test_exactly_one_of_many_threads_wins_an_exclusive_put(self, storage: Storage) -> None:
        for key in ("key", "new/directories/key", "new/key"):
            _assert_one_winner(storage, key, [storage] * 8)

    def test_exactly_one_of_many_storage_objects_wins_an_exclusive_put(self, storage: Storage) -> None:
        others = [self.reopen(storage) for _ in range(8)]
        for i in range(20):
            _assert_one_winner(storage, f"round{i}/key", others)

    # ---- waves -------------------------------------------------------------------------------------

    def test_a_wave_of_puts_makes_every_object(self, storage: Storage) -> None:
        wave = {f"w/{i}/object": _make_bytes(100 + i) for i in range(50)}
        versions = storage.put_many([Put(key, lambda data=data: data) for key, data in wave.items()])  # type: ignore[misc]
        assert list(versions) == list(wave)
        assert storage.get_many(list(wave)) == list(wave.values())

    def test_the_versions_of_a_wave_are_those_that_later_puts_expect(self, storage: Storage) -> None:
        versions = storage.put_many([Put(f"w/{i}", lambda: b"old") for i in range(3)])
        storage.put_many([Put(key, lambda: b"new", version) for key, version in versions.items()])
        assert storage.get_many(list(versions)) == [b"new"] * 3

    def test_ranges_and_whole_objects_come_in_one_wave(self, storage: Storage) -> None:
        for i in range(3):
            storage.put(f"r/{i}", _make_bytes(1000 + i))
        places = [("r/1", 5, 25), ("r/0", 0, None), ("r/1", 0, 1001), ("r/2", 990, 1002), ("r/1", 5, 6)]
        expected = [_make_bytes(1000 + int(key[-1]))[start:stop] for key, start, stop in places]
        assert storage.get_ranges(places) == expected
        with pytest.raises(FileNotFoundError):
            storage.get_ranges([("r/0", 0, 2), ("r/9", 0, 2)])

    def test_an_empty_wave_does_nothing(self, storage: Storage) -> None:
        assert storage.put_many([]) == {}
        assert storage.get_many([]) == []
        assert storage.get_ranges([]) == []

    def test_a_wave_with_errors_raises_the_first_once_the_others_have_ended(self, storage: Storage) -> None:
        has_failed, made = threading.Event(), list[int]()

        def fail(number: int) -> Callable[[], bytes]:
            def make() -> bytes:
                has_failed.set()
                raise ArithmeticError(f"object {number}")

            return make

        def succeed(number: int) -> Callable[[], bytes]:
            def make() -> bytes:
                has_failed.wait(_JOIN_S)
                made.append(number)
                return b"written"

            return make

        others = (2, 3, 4, 5, 7, 8)
        storage.put("w/2", b"old")
        with pytest.raises(ArithmeticError, match="object 1"):
            storage.put_many([Put(f"w/{i}", succeed(i) if i in others else fail(i)) for i in range(1, 9)])
        assert sorted(made) == [*others]
        found = {name: storage.get(f"w/{name}") for name in storage.list_names("w")}
        assert set(found.values()) <= {b"old", b"written"}  # a backend may put all of them or none
        assert found["2"] == b"old" or set(found.values()) == {b"written"}
        storage.put_many([Put(f"w/{i}", lambda: b"written") for i in range(1, 9)])
        assert storage.get_many([f"w/{i}" for i in range(1, 9)]) == [b"written"] * 8

    def test_a_wave_of_gets_answers_in_order(self, storage: Storage) -> None:
        for i in range(20):
            storage.put(f"k{i}", b"%d" % i)
        order = [7, 3, 3, 19, 0]
        assert storage.get_many([f"k{i}" for i in order]) == [b"%d" % i for i in order]

    def test_a_wave_of_gets_that_misses_one_is_a_file_not_found_error(self, storage: Storage) -> None:
        storage.put("there", b"1")
        with pytest.raises(FileNotFoundError):
            storage.get_many(["there", "not there", "there"])

    # ---- threads and processes ---------------------------------------------------------------------

    def test_a_reader_beside_a_replacing_writer_sees_only_whole_objects(self, storage: Storage) -> None:
        versions = [bytes([i]) * (1 + i * 7919 % 200_000) for i in range(40)]
        storage.put("key", versions[0])
        is_stopped = threading.Event()

        def read() -> set[bytes]:
            seen = set()
            while not is_stopped.is_set():
                seen.add(storage.get("key"))
            return seen

        with ThreadPoolExecutor(2) as threads:
            readers = [threads.submit(read) for _ in range(2)]
            try:
                for data in versions:
                    storage.put("key", data)
            finally:
                is_stopped.set()
            seen = set().union(*(reader.result() for reader in readers))
        assert seen
        assert seen <= set(versions)

    def test_a_pickled_storage_reads_and_writes_the_same_objects(self, storage: Storage) -> None:
        storage.put("key", b"original")
        copy: Storage = ForkingPickler.loads(bytes(ForkingPickler.dumps(storage)))
        assert copy.get("key") == b"original"
        copy.put("key", b"copy")
        assert storage.get("key") == b"copy"

    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_a_storage_in_use_works_in_a_child_process(self, storage: Storage, method: str) -> None:
        self._skip_without_processes(method)
        storage.put_many([Put(f"parent/{i}", lambda: _make_bytes(1000)) for i in range(4)])
        assert storage.list_names("child") == []
        assert _run_in_child(method, _copy_parent_objects, storage) == 0
        assert storage.list_names("child") == ["0", "1", "2", "3"]
        assert storage.get_many([f"child/{i}" for i in range(4)]) == [_make_bytes(1000)] * 4

    def test_a_get_after_a_listing_sees_objects_that_another_process_put_later(self, storage: Storage) -> None:
        self._skip_without_processes("fork")
        storage.put_many([Put(f"parent/{i}", lambda: b"data") for i in range(4)])
        storage.put("child/before", b"data")
        assert storage.list_names("child") == ["before"]
        assert _run_in_child("fork", _copy_parent_objects, storage) == 0
        assert storage.get("child/0") == b"data"
        assert storage.get_many(["child/0", "child/3"]) == [b"data"] * 2

    def test_a_child_forked_in_the_middle_of_a_put_can_use_the_storage(self, storage: Storage) -> None:
        self._skip_without_processes("fork")
        for i in range(4):
            storage.put(f"parent/{i}", _make_bytes(1000))
        is_stopped = threading.Event()

        def write() -> None:
            while not is_stopped.is_set():
                storage.put("busy", b"data")

        with ThreadPoolExecutor(2) as threads:
            writers = [threads.submit(write) for _ in range(2)]
            try:
                # All at once: a child connects by itself, which takes long beside threads that write.
                copies = [functools.partial(_copy_parent_objects, to=f"child{i}") for i in range(5)]
                children = [_start_child("fork", copy, storage) for copy in copies]
                codes = [_end_of(child) for child in children]
            finally:
                is_stopped.set()
            assert [writer.result() for writer in writers] == [None, None]
        assert codes == [0] * 5
        assert storage.get_many([f"child{i}/3" for i in range(5)]) == [_make_bytes(1000)] * 5

    def _skip_without_processes(self, method: str) -> None:
        if self.is_per_process:
            pytest.skip("the objects of this storage exist in one process only")
        if method not in multiprocessing.get_all_start_methods():
            pytest.skip(f"this system cannot start processes by {method}")


def _make_bytes(n_bytes: int) -> bytes:
    """Return bytes of many values, the same in every call."""
    period = bytes(i * i * 31 >> 7 & 255 for i in range(min(n_bytes, 65_537)))
    return (period * (n_bytes // 65_537 + 1))[:n_bytes]


def _copy_parent_objects(storage: Storage, to: str = "child") -> None:
    data = storage.get_many([f"parent/{i}" for i in range(4)])
    storage.put_many([Put(f"{to}/{i}", lambda i=i: data[i]) for i in range(4)])  # type: ignore[misc]


def _run_in_child(method: str, function: Callable[[Storage], None], storage: Storage) -> int | None:
    return _end_of(_start_child(method, function, storage))


def _start_child(method: str, function: Callable[[Storage], None], storage: Storage) -> BaseProcess:
    """Run a function in a child process."""
    with warnings.catch_warnings():
        # Forking a process that has threads is the purpose of the test.
        warnings.simplefilter("ignore", DeprecationWarning)
        child: BaseProcess = multiprocessing.get_context(method).Process(target=function, args=(storage,))  # type: ignore[attr-defined]
        child.start()
    return child


def _end_of(child: BaseProcess) -> int | None:
    """The exit code of a process, or None if it does not end in time."""
    child.join(_JOIN_S)
    code: int | None = child.exitcode
    if code is None:
        child.kill()
        child.join()
    child.close()
    return code


def _in_thread(function: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(function).result()


def _assert_one_winner(storage: Storage, key: str, racers: list[Storage]) -> None:
    before = sys.getswitchinterval()
    # Switch threads as often as possible once all have started: that makes races likely.
    start = threading.Barrier(len(racers), action=lambda: sys.setswitchinterval(1e-6))

    def attempt(number: int) -> bool:
        start.wait(_JOIN_S)
        try:
            racers[number].put(key, b"racer %d" % number, ABSENT)
        except FileExistsError:
            return False
        return True

    try:
        with ThreadPoolExecutor(len(racers)) as threads:
            has_won = list(threads.map(attempt, range(len(racers))))
    finally:
        sys.setswitchinterval(before)
    assert sum(has_won) == 1, f"{sum(has_won)} of {len(racers)} racers won {key}"
    assert storage.get(key) == b"racer %d" % has_won.index(True)
