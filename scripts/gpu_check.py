"""Check batches on a GPU: bits, launches, waits, CUDA graphs and throughput, with TorchRL in the same run.

Prints tables and writes a JSON file that can be attached to an issue. ``--device cpu`` checks the bits only, in
Triton's interpreter, to test this script on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import time
import uuid
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if "cpu" in sys.argv and find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

import numpy as np
import torch

import trajstore
from trajstore import Field, Priorities, Reader, Schema, Windows
from trajstore.sampling.batches.outputs import flat_outputs
from trajstore.sampling.batches.triton_executor import DeviceCounter, TritonExecutor
from trajstore.sampling.priorities.sum_tree import SumTree
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.triton import selection
from trajstore.sampling.triton.launching import counted_launches

Figures = dict[str, Any]
NO_GPU = (
    "gpu_check: torch finds no CUDA device here (torch.cuda.is_available() is False); run it on a machine with a"
    " GPU and a build of torch for it. `--device cpu` only tests the script."
)
WINDOWS: dict[str, Windows] = {
    "32 steps": Windows(length=32),
    "burn-in and bootstrap": Windows(length=8, burn_in=3, bootstrap=2),
    "strict context, stride": Windows(length=4, burn_in=2, stride=2, strict_context=True),
    "padded on both sides with zeros": Windows(length=6, stride=3, boundary="pad_both", pad="zero"),
    "padded left with a number": Windows(length=6, boundary="pad_left", pad=1),
    "padded right, by episode": Windows(length=6, boundary="pad_right", weight="episode"),
    "short, by step": Windows(length=20, boundary="short", weight="step"),
    "across episodes": Windows(length=6, boundary="cross"),
    "frame stacks": Windows(length=2, offsets={"observation": (-3, -2, -1, 0)}, pad="zero"),
    "n-step returns of 1 to 6 steps": Windows(length=3, n_step=(1, 6), next_fields="final"),
    "provenance": Windows(length=2, provenance=True),
    "transitions": Windows.transitions(),
    "transitions of 3 steps": Windows.transitions(n_step=3),
    "transitions of 11 steps": Windows.transitions(n_step=11, gamma=0.9),
}


# ---- data


def values(n: int, rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    if dtype == "uint8":
        return rng.integers(0, 256, (n, *shape), np.uint8)
    return rng.standard_normal((n, *shape)).astype(dtype)


def make_store(n_steps: int, shape: tuple[int, ...], dtype: str, length: int = 200) -> trajstore.Store:
    """A store in memory: episodes of different lengths, ended in different ways."""
    fields = {
        "observation": Field(dtype, shape, final=True),
        "action": Field("float32", (8,)),
        "flag": Field("bool"),
        "reward": Field("float32"),
    }
    store = trajstore.create(f"memory://gpu-check-{uuid.uuid4().hex}", Schema(fields))
    rng = np.random.default_rng(0)
    with store.writer(commit_seconds=None) as writer:
        left, i = n_steps, 0
        while left > 0:
            n = min(left, int(rng.integers(1, 2 * length)))
            episode = {
                "observation": values(n + 1, rng, shape, dtype),
                "action": values(n, rng, (8,), "float32"),
                "flag": rng.random(n) < 0.5,
                "reward": values(n, rng, (), "float32"),
            }
            writer.append_episode(episode, terminated=i % 3 == 0, truncated=i % 3 == 1)
            left, i = left - n, i + 1
    store.refresh()
    return store


def resident_reader(store: trajstore.Store, device: str, **options: Any) -> Reader:
    """A reader whose cache holds everything."""
    reader = Reader(store, device=device, cache_bytes="8GiB", **options)
    for windows in (Windows(), Windows(next_fields="final")):
        for _ in reader.epoch(4096, windows):
            pass
    return reader


# ---- correctness


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.cpu().contiguous().view(-1).view(torch.uint8)


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """The keys whose values have other bits."""
    bad = sorted(got.keys() ^ expected.keys())
    for key in got.keys() & expected.keys():
        mine, theirs = got[key], expected[key]
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype) or not torch.equal(bits(mine), bits(theirs)):
            bad.append(key)
    return bad


def check_batches(store: trajstore.Store, device: str, n: int) -> Figures:
    """Batches of every kind, by the public call and by the executor, against compiled loops on the CPU."""
    ours, theirs = Reader(store, device=device, compiled=False), Reader(store)
    for windows in (Windows(), Windows(next_fields="final")):
        for reader in (ours, theirs):
            list(reader.epoch(4096, windows))
    found: Figures = {}
    for name, windows in WINDOWS.items():
        rngs = CounterRng(7), CounterRng(7)
        ours.rng, theirs.rng = rngs
        expected = flat_outputs(theirs.sample(n, windows))
        bad = same(flat_outputs(ours.sample(n, windows)), expected)
        kind, launches = ours.assembler.kind(windows), None
        if isinstance(kind.executor, TritonExecutor) and kind.starts.chains is None:
            with counted_launches() as names:
                batch = kind.executor.run(ours.assembler.cache, kind.starts, (n, CounterRng(7), 0), {})
            bad += ["not resident"] if batch is None else same(batch, expected)
            launches = len(names)
        found[name] = {"differs": sorted(set(bad)), "launches": launches}
    return found


def check_tree(device: str, n: int, n_rounds: int) -> Figures:
    """Draws from a sum tree and updates with indexes that occur twice, against compiled loops on the CPU."""
    masses = torch.from_numpy(np.random.default_rng(1).integers(0, 1 << 30, n))
    ours, theirs = SumTree(torch.device(device), compiled=False), SumTree(torch.device("cpu"))
    ours.rebuild(masses.to(device))
    theirs.rebuild(masses)
    rng, other, bad = CounterRng(3), CounterRng(3), 0
    with counted_launches() as names:
        for i in range(n_rounds):
            leaf, mass = ours.draw(256, rng, stratified=i % 2 == 1)
            expected, _ = theirs.draw(256, other, stratified=i % 2 == 1)
            bad += not torch.equal(leaf.cpu(), expected)
            theirs.put(expected, mass.cpu() // 2 + i)
            ours.put(leaf, mass // 2 + i)
    bad += int(ours.total) != int(theirs.total)
    return {"differs": ["draws or sums"] * bool(bad), "launches": len(names) / n_rounds or None}


# ---- on a GPU only


def kernels_of(action: Callable[[], Any]) -> int:
    """How many kernels and copies the device executes, as torch's profiler counts them."""
    from torch.profiler import ProfilerActivity, profile

    action()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        action()
        torch.cuda.synchronize()
    return sum("CUDA" in str(event.device_type) for event in profiler.events())


def waits(action: Callable[[], Any]) -> str:
    """What makes the host wait for the device; "" if nothing does."""
    action()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        action()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(action: Callable[[], Any], seconds: float) -> float:
    """Median time of a call, with all work of the device; calls are timed in groups of ten."""
    for _ in range(10):
        action()
    times, stop = [], time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times) < 5:
        synchronize()
        start = time.perf_counter()
        for _ in range(10):
            action()
        synchronize()
        times.append((time.perf_counter() - start) / 10)
    return 1000 * statistics.median(times)


def graph_of(reader: Reader, n: int, windows: Windows) -> tuple[Callable[[], Any], list[str]]:
    """A CUDA graph of one batch, and the keys in which its replays differ from single batches."""
    kind, cache, rng = reader.assembler.kind(windows), reader.assembler.cache, CounterRng(11)
    assert isinstance(kind.executor, TritonExecutor)
    executor, counter = kind.executor, DeviceCounter(rng, reader.assembler.device)
    outs = executor.run(cache, kind.starts, (n, CounterRng(1), 0), {})
    assert outs is not None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        executor.run(cache, kind.starts, (n, counter, 0), outs)
    bad: list[str] = []
    for _ in range(3):
        graph.replay()
        bad += same(outs, executor.run(cache, kind.starts, (n, rng, 0), {}) or {})
    return graph.replay, bad


def torchrl_buffer(store: trajstore.Store, device: str, kind: str, n: int, length: int) -> Callable[[], Any] | None:
    """Draws from TorchRL's buffer of the same steps on the same device; None where it is not installed."""
    if not find_spec("torchrl"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, PrioritizedSampler, RandomSampler, ReplayBuffer, SliceSampler
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    windows = Windows.transitions() if length == 1 else Windows(squeeze=True)
    steps = next(iter(Reader(store).epoch(1 << 30, windows, shuffle=False)))
    steps = {key: value for key, value in flat_outputs(steps).items() if key not in ("valid", "learn", "index")}
    n_steps = len(steps["reward"])
    samplers = {
        "windows": lambda: SliceSampler(slice_len=length, end_key="is_last", cache_values=True, strict_length=True),
        "transitions": RandomSampler,
        "prioritised": lambda: PrioritizedSampler(n_steps, alpha=0.6, beta=0.4),
    }
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(n_steps, device=device), sampler=samplers[kind](), batch_size=n * length
    )
    buffer.extend(TensorDict({key.replace("/", "_"): v for key, v in steps.items()}, [n_steps]).to(device))
    if kind != "prioritised":
        return buffer.sample

    def draw_and_update() -> None:
        batch, info = buffer.sample(return_info=True)
        buffer.update_priority(info["index"], batch["reward"].abs() + 0.1)

    return draw_and_update


def ours_of(
    store: trajstore.Store, device: str, kind: str, n: int, windows: Windows
) -> tuple[Reader, Callable[[], Any]]:
    """A resident reader, and a loop that draws from it."""
    if kind != "prioritised":
        reader = resident_reader(store, device)
        return reader, lambda: reader.sample(n, windows)
    reader = resident_reader(store, device, priorities=Priorities(alpha=0.6, beta=0.4))

    def draw_and_update() -> None:
        batch = reader.sample(n, windows)
        reader.update_priorities(batch, batch["reward"].abs() + 0.1)

    return reader, draw_and_update


def measure(device: str, quick: bool) -> Figures:
    """Throughput of several loops, each beside TorchRL's, with launches, waits and CUDA graphs."""
    n_steps, seconds = (20_000, 0.3) if quick else (500_000, 2.0)
    state = make_store(n_steps, (64,), "float32")
    frames = make_store(n_steps // 20, (64, 64, 3), "uint8")
    loops: dict[str, tuple[trajstore.Store, str, int, Windows]] = {
        "windows 256 x 32": (state, "windows", 256, Windows(length=32)),
        "transitions 256": (state, "transitions", 256, Windows.transitions()),
        "transitions 4096": (state, "transitions", 4096, Windows.transitions()),
        "prioritised 256 and update": (state, "prioritised", 256, Windows.transitions()),
        "frames 16 x 64": (frames, "windows", 16, Windows(length=64)),
    }
    found: Figures = {}
    for name, (store, kind, n, windows) in loops.items():
        reader, action = ours_of(store, device, kind, n, windows)
        row: Figures = {"ms": milliseconds(action, seconds), "kernels": kernels_of(action), "waits": waits(action)}
        if kind != "prioritised":
            replay, bad = graph_of(reader, n, windows)
            row |= {"graph_ms": milliseconds(replay, seconds), "graph_differs": bad}
        try:
            peer = torchrl_buffer(store, device, kind, n, windows.size)
            row["torchrl_ms"] = None if peer is None else milliseconds(peer, seconds)
        except Exception as error:  # a peer that fails must not hide our figures
            row["torchrl_ms"], row["torchrl_error"] = None, f"{type(error).__name__}: {error}"
        found[name] = row
        print(f"  {name:30}" + "  ".join(f"{key} {_shown(value)}" for key, value in row.items()), flush=True)
    return found


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


# ---- report


def facts(device: str) -> Figures:
    """Versions, and what the device is."""
    packages: Figures = {}
    for name in ("torch", "triton", "torchrl", "tensordict", "numpy"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    found = {"device": device, "platform": platform.platform(), "python": platform.python_version()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        capability = f"{properties.major}.{properties.minor}"
        found |= {"gpu": properties.name, "capability": capability, "cuda": str(torch.version.cuda)}
    return found | {"trajstore": trajstore.__version__, "packages": packages}


def run(device: str, quick: bool) -> Figures:
    """Run all checks; returns what is written to the file."""
    report: Figures = {"facts": facts(device)}
    selection.is_interpreted = device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    has_kernels = selection.device_kernels(torch.device(device)) is not None
    report["facts"]["kernels"] = "Triton" if has_kernels else "none: tensor operations"
    n_steps, n = (400, 9) if quick else (20_000, 512)
    print(f"bits, against the CPU ({report['facts']['kernels']})", flush=True)
    report["batches"] = check_batches(make_store(n_steps, (64,), "float32", 25), device, n)
    report["tree"] = check_tree(device, 300 if quick else 1_000_000, 2 if quick else 50)
    for name, row in {**report["batches"], "sum tree, draw and update": report["tree"]}.items():
        wrong = ", ".join(row["differs"])
        print(f"  {name:35} {'DIFFERS: ' + wrong if wrong else 'equal'}, launches: {row['launches']}", flush=True)
    if device == "cuda":
        print("throughput, milliseconds a batch", flush=True)
        report["loops"] = measure(device, quick)
    checks = [*report["batches"].values(), report["tree"]]
    graphs = [loop.get("graph_differs", []) for loop in report.get("loops", {}).values()]
    report["is_correct"] = not any(row["differs"] for row in checks) and not any(graphs)
    return report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tests this script")
    parser.add_argument("--quick", action="store_true", help="small data, short measurements")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="the file to write")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    report = run(options.device, options.quick)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{'all bits are equal' if report['is_correct'] else 'SOME BITS DIFFER'}; details: {options.out}")
    return 0 if report["is_correct"] else 1


if __name__ == "__main__":
    sys.exit(main())
