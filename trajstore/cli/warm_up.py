"""The command ``warm-up``: compile all loops ahead of time."""

import importlib
import logging
import pkgutil
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from trajstore.cli.exit_codes import FAILED, FINE
from trajstore.cli.output import Facts, format_count, format_seconds, print_facts, progress_bar
from trajstore.cli.parameters import AsJson

if TYPE_CHECKING:
    from rich.console import Console


def warm_up(as_json: AsJson = False) -> int:
    """Compile the loops that draw and copy batches, so that no later process has to wait for it.

    The machine code is kept beside the package if that can be written, else in the user's cache directory, or where
    NUMBA_CACHE_DIR says. If it can't be kept, stops at once and exits with 2.
    """
    start = time.perf_counter()
    try:
        importlib.import_module("numba")
    except ImportError:  # numba supports new versions of Python with some delay
        facts: Facts = {"n_loops": 0, "n_compiled": 0, "kept_in": None, "missed": []}
    else:
        facts = compile_loops()
    facts["seconds"] = time.perf_counter() - start
    print_facts(facts, _print_warm_up, as_json)
    return FAILED if facts["n_compiled"] and facts["kept_in"] is None else FINE


def compile_loops() -> Facts:
    """Draw batches of small stores in memory in all ways that use compiled loops.

    Returns:
        How many loops exist and how many were compiled, where their code is kept, and the names of loops that were
        not used. The first code that can't be kept is the last that is compiled.
    """
    from trajstore.sampling.compiled.compile_times import COMPILE_TIMES
    from trajstore.sampling.compiled.jit import LOOPS

    package = importlib.import_module("trajstore.sampling.compiled")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    logging.getLogger("trajstore.sampling.compiled").setLevel(logging.ERROR)  # this command says it itself
    before = COMPILE_TIMES.n_loops

    def is_lost() -> bool:
        return COMPILE_TIMES.n_loops > before and COMPILE_TIMES.kept_in is None

    with progress_bar("loops") as progress:
        for use in _USES:
            use()
            if progress is not None:
                progress(len(_used(LOOPS)), len(LOOPS))
            if is_lost():
                break
    used = set(LOOPS) if is_lost() else _used(LOOPS)
    paths = [loop.stats.cache_path for loop in LOOPS]
    kept_in = COMPILE_TIMES.kept_in if COMPILE_TIMES.n_loops > before else paths[0]
    return {
        "n_loops": len(LOOPS),
        "n_compiled": COMPILE_TIMES.n_loops - before,
        "kept_in": None if kept_in is None else str(kept_in),
        "missed": [f"{loop.__module__}.{loop.__name__}" for loop in LOOPS if loop not in used],
    }


def _used(loops: list[Any]) -> set[Any]:
    """The loops that were called, and those that they call: kept code holds these as well."""
    from trajstore.sampling.compiled.code_cache import callees
    from trajstore.sampling.compiled.jit import C_FUNCTIONS

    found, ahead = set(), [loop for loop in loops if loop.signatures]
    ahead += [inner for f in C_FUNCTIONS if f.is_compiled for inner in callees(f.py_func) if inner in loops]
    while ahead:
        loop = ahead.pop()
        found.add(loop)
        ahead += [inner for inner in callees(loop.py_func) if inner in loops and inner not in found]
    return found


# ---- all ways that use compiled loops


def _url() -> str:
    return f"memory://trajstore-warm-up-{uuid.uuid4().hex}"


def _steps(n: int) -> dict[str, Any]:
    return {
        "observation": np.zeros((n, 2), np.float32),
        "action": np.zeros(n, np.int64),
        "reward": np.ones(n, np.float32),
    }


def _live_buffer() -> None:
    """Batches of steps that are partly committed, uniform and prioritised, with updates of priorities."""
    import torch

    from trajstore import Priorities, ReplayBuffer, Windows

    kinds = (
        Windows(3),
        Windows(3, boundary="pad_right", n_step=2),
        Windows.transitions(n_step=3),
    )
    for priorities in (None, Priorities(), Priorities(stratified=True)):
        with ReplayBuffer(_url(), priorities=priorities, capacity=60, commit_seconds=None) as buffer:
            for i in range(100):
                step = {name: value[0] for name, value in _steps(1).items()}
                buffer.append(step, terminated=i % 10 == 9)
                if i in (15, 50):
                    buffer.flush()
                if i % 25 in (20, 21, 22):  # also after a step that no episode ended with
                    for kind in kinds:
                        batch = buffer.sample(4, kind)
                        if priorities is not None:
                            buffer.update_priorities(batch["index"], torch.ones(4))
                            buffer.sample(4, kind, prioritised=False)


def _small_cache() -> None:
    """Batches of a store that is larger than the cache."""
    from trajstore import Field, Reader, Schema, Windows, create

    fields = {
        name: Field(str(value.dtype), value.shape[1:], chunk_rows=4, final=value.ndim > 1)
        for name, value in _steps(1).items()
    }
    store = create(_url(), Schema(fields))
    with store.writer(commit_seconds=None) as writer:
        for _ in range(10):
            writer.append_episode(_steps(20) | {"observation": np.zeros((21, 2), np.float32)}, terminated=True)
    store.refresh()
    for cache_bytes in (1, 1 << 20):
        reader = Reader(store, cache_bytes=cache_bytes)
        for kind in (Windows(2), Windows(2, weight="episode"), Windows(2, boundary="cross"), Windows.transitions()):
            reader.sample(64, kind)


def _frames() -> None:
    """Batches of frames in local files that are larger than the cache."""
    import tempfile

    from trajstore import Field, Reader, Schema, Windows, create

    with tempfile.TemporaryDirectory() as directory:
        store = create(directory, Schema({"observation": Field("uint8", (64, 64), chunk_rows=32)}), fsync=False)
        with store.writer(commit_seconds=None) as writer:
            writer.append_episode({"observation": np.zeros((256, 64, 64), np.uint8)}, terminated=True)
        store.refresh()
        reader = Reader(store, cache_bytes=1)
        for _ in range(3):  # the first ones map files
            reader.sample(4, Windows())


def _threads() -> None:
    """A batch so large that several threads copy it."""
    import torch

    from trajstore import ReplayBuffer, Windows

    n_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ReplayBuffer(_url(), commit_seconds=None) as buffer:
            buffer.add_episode({"observation": np.zeros((4096, 64), np.float32)}, terminated=True)
            buffer.flush()
            for _ in range(3):  # the first ones load pages
                buffer.sample(4096, Windows())
    finally:
        torch.set_num_threads(n_threads)


def _partitions() -> None:
    """The division of episodes among ranks."""
    from trajstore.distributed.partitions import assign_episodes

    assign_episodes(np.arange(4), 2)


def _epochs() -> None:
    """The order of an epoch."""
    from trajstore.sampling.permutation import Permutation

    Permutation(10, 0)(0, 10)


# The first compiles one loop: enough to see whether its code can be kept.
_USES: tuple[Callable[[], None], ...] = (_epochs, _partitions, _live_buffer, _small_cache, _frames, _threads)


# ---- output


def _print_warm_up(console: "Console", facts: Facts) -> None:
    for line in _lines(facts):
        console.print(line, soft_wrap=True)


def _lines(facts: Facts) -> Iterator[str]:
    seconds = format_seconds(facts["seconds"])
    if not facts["n_loops"]:
        yield "Nothing to compile: numba is not installed, so batches are made with tensor operations."
    elif not facts["n_compiled"]:
        yield f"Nothing to compile: the code of all loops is kept in {facts['kept_in']}; checked in {seconds}."
    elif facts["kept_in"] is None:
        yield (
            f"Stopped after {format_count(facts['n_compiled'], 'loop')}: no directory can be written to keep the"
            " code, so every process compiles all loops again. Set NUMBA_CACHE_DIR to a directory that can be"
            " written."
        )
    else:
        yield f"Compiled {format_count(facts['n_compiled'], 'loop')} in {seconds}, kept in {facts['kept_in']}."
    if facts["missed"]:
        yield f"Not compiled, because nothing here uses them: {', '.join(facts['missed'])}."
