"""Memory that is given back to the system, and the stagings and arenas that do so."""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
import pytest

from trajstore import Field, Schema
from trajstore.host_memory import FEW_BYTES, HostMemory
from trajstore.writing.staging import Staging


def resident_bytes(memory: HostMemory) -> int:
    """The bytes of a block that have memory behind them.

    Asked of the block's own pages: what the rest of the process takes or gives back does not count.
    """
    page = mmap.PAGESIZE
    start = memory.array.ctypes.data // page * page
    n_bytes = memory.array.ctypes.data + len(memory.array) - start
    pages = (ctypes.c_ubyte * -(-n_bytes // page))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    assert mincore(ctypes.c_void_p(start), ctypes.c_size_t(n_bytes), pages) == 0
    return int((np.frombuffer(pages, np.uint8) & 1).sum()) * page


@pytest.mark.parametrize("n_bytes", [0, 1, 1000, 1 << 18, (1 << 18) + 1, 32 << 20])
def test_a_block_is_zeros_that_can_be_written(n_bytes: int) -> None:
    memory = HostMemory(n_bytes)
    assert memory.array.shape == (n_bytes,)
    assert not memory.array.any()
    memory.array[:] = 7
    memory.use_huge_pages(FEW_BYTES, n_bytes)
    assert (memory.array == 7).all()


def test_memory_lives_as_long_as_an_array_of_it() -> None:
    array = HostMemory(1 << 20).array[4096:].view(np.float64)
    array[:] = 1.5
    assert (array == 1.5).all()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep the memory")
def test_discarded_memory_is_given_back_and_nothing_beside_it() -> None:
    memory = HostMemory(64 << 20)
    memory.array[:] = 1
    assert resident_bytes(memory) >= 64 << 20
    memory.discard(5000, (64 << 20) - 5000)
    assert resident_bytes(memory) <= 4 << 20
    assert memory.array[:5000].all()
    assert memory.array[-5000:].all()


@pytest.mark.parametrize("grows", [False, True])
def test_too_much_memory_is_a_memory_error(grows: bool) -> None:
    with pytest.raises(MemoryError):
        HostMemory(1 << 62, grows=grows)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems reserve no addresses")
def test_a_block_grows_and_shrinks_where_it_lies() -> None:
    memory = HostMemory(16 << 20, grows=True)
    memory.array[:] = 7
    address = memory.array.ctypes.data
    assert memory.resize(48 << 20)
    assert memory.array.ctypes.data == address
    assert (memory.array[: 16 << 20] == 7).all()
    assert len(memory.array) == 48 << 20
    assert resident_bytes(memory) <= 20 << 20  # what is added takes no memory before it is used
    assert memory.resize(1 << 20)
    assert (memory.array == 7).all()
    assert memory.resize(16 << 20)  # the rest was given back: it comes again as zeros
    assert resident_bytes(memory) <= 4 << 20
    assert not memory.array[1 << 20 :].any()
    assert memory.resize(1 << 20)
    assert not memory.resize(memory.room + 1)
    assert len(memory.array) == 1 << 20


def test_a_block_that_does_not_grow_takes_no_more_addresses_than_it_has_bytes() -> None:
    memory = HostMemory(1 << 20)
    assert memory.room == 1 << 20
    assert not memory.resize((1 << 20) + 1)


@pytest.mark.parametrize("capacity", [1, 7, 100_000])
def test_columns_of_a_staging_do_not_overlap(capacity: int) -> None:
    fields = {"a": Field("uint8"), "b": Field("float64", (3,)), "c": Field("bool"), "d": Field("int16", (2, 2))}
    staging = Staging(Schema(fields), capacity)
    for i, column in enumerate(staging.columns.values()):
        assert len(column) == capacity
        column[...] = i % 2
    for i, (path, spec) in enumerate(fields.items()):
        assert staging.columns[path].shape == (capacity, *spec.shape)
        assert staging.columns[path].dtype == spec.storage_dtype
        assert (staging.columns[path] == i % 2).all()
