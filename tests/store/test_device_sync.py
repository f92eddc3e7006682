"""No waiting for the host: what sampling from a resident cache does to a device, seen operation by operation."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import trajstore
from tests.sampling.test_reader import small_store
from trajstore import Field, Reader, Ring, Schema, Store, Windows
from trajstore.sampling.batches.outputs import flat_outputs
from trajstore.sampling.index.episode_index import EpisodeIndex
from trajstore.sampling.index.snapshot_follower import SnapshotFollower

aten = torch.ops.aten
# Their result, or the shape of it, is only known once the device has come to them.
WAITING = {
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}


class NoSync(TorchDispatchMode):
    """Refuses every operation that copies between devices, waits for the one named, or mixes them in an index."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self._device = device
        self.n_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.n_operations += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func in WAITING and any(tensor.device.type == self._device for tensor in tensors):
            raise AssertionError(f"{func} waits for the device")
        if func in INDEXING:
            self._check_index(func, args)
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device for tensor in (*tensors, *results)}
        if len(devices) > 1:
            raise AssertionError(f"{func} has to do with {', '.join(map(str, devices))}")
        return result

    def _check_index(self, func: Any, args: Any) -> None:
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                raise AssertionError(f"{func} with a mask: the size of its result is not known")
            if index is not None and index.device != args[0].device:
                raise AssertionError(f"{func} of {args[0].device} by an index of {index.device}")


SPECS = [
    Windows(),
    Windows(length=4, boundary="pad_both", stride=2, pad="zero"),
    Windows(length=3, burn_in=2, bootstrap=1, boundary="short", pad=-3.0),
    Windows(length=3, burn_in=1, strict_context=True, weight="step"),
    Windows(length=4, weight="episode", n_step=(1, 3), next_fields=("obs",)),
    Windows(length=5, burn_in=2, boundary="cross"),
    Windows(length=5, boundary="cross", weight="step", n_step=2),
    Windows(length=2, offsets={"obs": (-2, -1, 0), "action": (0, 1)}),
    Windows.transitions(n_step=3),
]


@pytest.mark.parametrize("bad", ["copy", "item", "nonzero", "mask", "mixed index", "unique"])
def test_the_mode_refuses_what_it_should(bad: str) -> None:
    x, there = torch.arange(4), torch.arange(4, device="meta")
    actions = {
        "copy": lambda: x.to("meta"),
        "item": lambda: x[0].item(),
        "nonzero": lambda: torch.nonzero(x),
        "mask": lambda: x[x > 1],
        "mixed index": lambda: there[x],
        "unique": lambda: torch.unique(x),
    }
    with NoSync(), pytest.raises(AssertionError):
        actions[bad]()


@pytest.mark.parametrize("spec", SPECS)
def test_sampling_from_a_resident_cache_waits_for_nothing(spec: Windows) -> None:
    store, _ = small_store("no-sync", 20)
    reader = Reader(store, compiled=False)
    list(reader.epoch(64, Windows()))
    list(reader.epoch(64, Windows(next_fields="final")))
    reader.sample(8, spec)  # sums are made when a kind of window is first asked for
    ring = Ring(1)
    with NoSync() as mode:
        reader.sample(32, spec)
        reader.sample(32, spec, recent_episodes=3)
        for _ in range(2):
            reader.sample(32, spec, out=ring)
    assert mode.n_operations > 20


def resident_on_meta(store: Store, **options: Any) -> Reader:
    """A reader on a device without memory, whose columns believe that all their pages are there."""
    reader = Reader(store, device="meta", compiled=False, **options)
    for column in reader.assembler.cache._columns.values():
        pages = column.table.missing(np.arange(column.table.n_pages))
        column.table.set_resident(pages, pages, 1)
        assert column.table.is_complete
    return reader


@pytest.mark.parametrize("spec", SPECS)
def test_sampling_works_on_a_device_that_has_no_values(spec: Windows) -> None:
    store, _ = small_store("meta", 20)
    reader, ring = resident_on_meta(store), Ring(1)
    reader.sample(8, spec)
    with NoSync("meta"):
        batch = flat_outputs(reader.sample(32, spec))
        reader.sample(32, spec, recent_steps=50, recent_fraction=0.5)
        reader.sample(32, spec, recent_episodes=3)
        for _ in range(2):
            reader.sample(32, spec, out=ring)
    expected = flat_outputs(Reader(store, compiled=False).sample(32, spec))
    assert batch.keys() == expected.keys()
    for key, value in batch.items():
        assert value.device.type == "meta"
        assert (value.shape, value.dtype) == (expected[key].shape, expected[key].dtype), key
    assert reader.stats()["n_syncs"] == reader.stats()["misses"] == 0


@pytest.mark.parametrize("spec", SPECS)
def test_sampling_works_on_fake_tensors(spec: Windows) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    store, _ = small_store("fake", 20)
    reader = Reader(store, compiled=False)
    list(reader.epoch(64, Windows()))
    list(reader.epoch(64, Windows(next_fields="final")))
    expected = flat_outputs(reader.sample(16, spec))
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = flat_outputs(reader.sample(16, spec))
    assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {k: (v.shape, v.dtype) for k, v in expected.items()}


def test_the_index_is_drawn_from_without_values() -> None:
    store, _ = small_store("meta-index", 20)
    index = EpisodeIndex(torch.device("meta"))
    SnapshotFollower(index).follow(store.snapshot)
    entry, position = torch.zeros(8, dtype=torch.int64, device="meta"), torch.zeros(8, 4, device="meta").long()
    index.rows(entry, position)  # tables are copied to the device when they are first asked for
    with NoSync("meta"):
        rows = index.rows(entry, position)
    assert rows.row.shape == (8, 4)


def test_a_batch_with_misses_counts_as_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = small_store("counted", 20)
    reader = Reader(store, compiled=False)
    cache = reader.assembler.cache
    monkeypatch.setattr(cache, "_device", torch.device("meta"))  # columns go on working on the CPU
    spec = Windows(length=3, next_fields=("obs",), n_step=2)
    for n in (1, 2, 3):
        reader.sample(2, spec)
        assert reader.stats()["n_syncs"] == n
    list(reader.epoch(64, Windows()))
    list(reader.epoch(64, Windows(next_fields="final")))
    before = reader.stats()["n_syncs"]
    for _ in range(5):
        reader.sample(64, spec)
    assert reader.stats()["n_syncs"] == before


def test_only_the_asked_fields_need_be_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = small_store("asked", 20)
    reader = Reader(store, compiled=False)
    list(reader.epoch(64, Windows(fields=["action"])))
    list(reader.epoch(64, Windows(fields=["action"], next_fields=["action"])))
    monkeypatch.setattr(reader.assembler.cache, "_device", torch.device("meta"))
    before = reader.stats()["n_syncs"]
    with NoSync():
        reader.sample(16, Windows(fields=["action"]))
    assert reader.stats()["n_syncs"] == before
    reader.sample(16, Windows(fields=["action", "reward"]))
    assert reader.stats()["n_syncs"] == before + 1


def test_chunks_that_hold_nothing_to_draw_do_not_keep_a_cache_from_being_complete() -> None:
    """Those of episodes that were aborted are never asked for, so they are never loaded."""
    store = trajstore.create(f"memory://aborted-{uuid.uuid4().hex}", Schema({"x": Field("int64", chunk_rows=2)}))
    writer = store.writer(commit_seconds=None)
    for t in range(8):
        writer.append({"x": t})
    writer.commit()
    writer.abort_episode()
    writer.append_episode({"x": np.arange(8)}, terminated=True)
    writer.close()
    store.refresh()
    reader = Reader(store, compiled=False)
    list(reader.epoch(4, Windows()))
    reader.sample(8, Windows())
    assert reader.n_windows(Windows()) == 8
    with NoSync():
        reader.sample(8, Windows())
    assert reader.assembler.cache._columns["x"].table.is_complete


# ---- on a GPU ------------------------------------------------------------------------------------------

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.cuda
@cuda
@pytest.mark.parametrize("spec", SPECS)
def test_batches_are_the_same_on_a_gpu(spec: Windows) -> None:
    store, _ = small_store("gpu", 20)
    for cache_bytes in (100, 1 << 20):
        here, there = Reader(store, seed=4), Reader(store, seed=4, device="cuda", cache_bytes=cache_bytes)
        for _ in range(4):
            expected, got = (flat_outputs(reader.sample(32, spec)) for reader in (here, there))
            for key, value in expected.items():
                assert torch.allclose(value.double(), got[key].cpu().double(), rtol=1e-6), key


@pytest.mark.cuda
@cuda
@pytest.mark.parametrize("spec", SPECS)
def test_a_resident_cache_on_a_gpu_is_never_waited_for(spec: Windows) -> None:
    store, _ = small_store("gpu-sync", 20)
    reader = Reader(store, device="cuda")
    list(reader.epoch(64, Windows()))
    list(reader.epoch(64, Windows(next_fields="final")))
    reader.sample(8, spec)
    before = reader.stats()["n_syncs"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with NoSync("cuda"):
            reader.sample(64, spec)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert reader.stats()["n_syncs"] == before


@pytest.mark.cuda
@cuda
def test_prefetched_batches_on_a_gpu_are_whole() -> None:
    store, _ = small_store("gpu-prefetch", 20)
    spec = Windows(length=3)
    plain = Reader(store, seed=1, device="cuda").epoch(16, spec)
    with Reader(store, seed=1, device="cuda", cache_bytes=100).epoch(16, spec, prefetch=3, out=Ring(5)) as epoch:
        for expected, got in zip(plain, epoch, strict=True):
            assert all(torch.equal(expected[key], got[key]) for key in expected)
