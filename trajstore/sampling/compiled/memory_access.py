"""Memory that compiled loops reach by address. Importing this module imports numba."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from trajstore.sampling.compiled.jit import compiled

MANY = 1 << 31  # the length of arrays whose length does not matter

array_at: Any = numba.carray  # type: ignore[attr-defined]  # an array from a pointer, its shape and dtype
_BYTES = ir.IntType(8).as_pointer()


def _as_pointer(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _BYTES)

    return types.voidptr(types.int64), generate


pointer: Any = intrinsic(_as_pointer)  # a memory address as a pointer


def _as_copy(context: Any, to: Any, at: Any, n: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, at, n = arguments
        copy_bytes: Any = cgutils.raw_memcpy
        copy_bytes(builder, builder.inttoptr(to, _BYTES), builder.inttoptr(at, _BYTES), n, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


copy_memory: Any = intrinsic(_as_copy)  # copies bytes: the address to copy to, the one to copy from, and how many


def _move(bits: int) -> Any:
    """A function that copies a number of so many bits, without a call."""
    pointer = ir.IntType(bits).as_pointer()

    @intrinsic
    def move(context: Any, to: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            to, at = (builder.inttoptr(address, pointer) for address in arguments)
            builder.store(builder.load(at, align=1), to, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return move


def _as_take(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(64)
        return builder.atomic_rmw(
            "add", builder.inttoptr(arguments[0], number.as_pointer()), number(1), "monotonic"
        )

    return types.int64(types.int64), generate


take_number: Any = intrinsic(_as_take)  # the number at a memory address, which it raises by 1; threads take turns
move_1, move_4, move_8, move_16 = _move(8), _move(32), _move(64), _move(128)


def _as_prefetch(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), (_BYTES, number, number, number))
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", (_BYTES,), kind)
        builder.call(prefetch, [builder.inttoptr(arguments[0], _BYTES), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


prefetch: Any = intrinsic(_as_prefetch)  # asks for the cache line of a memory address; any number is allowed


@compiled
def page_address(arena: Any, slot: Any, page_bytes: Any) -> Any:
    """Return the memory address of a page: in a slot of the arena, or, if ``slot`` is below -1, in a file."""
    return arena + slot * page_bytes if slot >= 0 else -slot
