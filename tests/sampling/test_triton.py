"""Kernels for GPUs: interpreted, compiled ahead for several kinds of GPU, and on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.sampling.test_reader import small_store
from trajstore import Reader, Windows
from trajstore.sampling.batches import triton_executor
from trajstore.sampling.batches.batch_program import BatchProgram
from trajstore.sampling.batches.outputs import flat_outputs
from trajstore.sampling.batches.torch_executor import TorchExecutor
from trajstore.sampling.batches.triton_executor import BLOCKS, DeviceCounter, TritonExecutor, new_executor
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.triton import selection
from trajstore.sampling.triton.launching import counted_launches

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(
    not find_spec("triton"), reason="Triton is not installed: pip install trajstore[gpu]"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@needs_triton
def test_interpreted_kernels_give_the_bits_of_tensor_operations() -> None:
    """In a process of its own: Triton decides when it is imported whether to interpret."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/sampling/interpreted_kernels.py",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1]


# ---- compiled ahead

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
SUMS = [(n, 0) for n in (1, 2, 3)] + [(4, left) for left in range(4)]


def specialisations(tl: Any) -> list[tuple[str, str, dict[str, Any]]]:
    """Every kernel with every set of constants that it is launched with: module, name, constants."""
    from trajstore.sampling.batches.device_tables import TILE
    from trajstore.sampling.triton import tree_launches

    frames = [
        {"is_drawn": is_drawn, "block_windows": windows, "block_steps": steps}
        for is_drawn in (True, False)
        for windows, steps in BLOCKS
    ]
    sums = [("float32", *counts) for counts in SUMS]
    sums += [(dtype, 4, 1) for dtype in sorted({*triton_executor.TRITON_DTYPES.values()} - {"float32"})]
    rewards = [
        {
            "stored": getattr(tl, stored),
            "dtype": tl.float64 if stored == "float64" else tl.float32,
            "n_sums": n_sums,
            "n_left_over": left,
            "block": triton_executor.SUM_BLOCK,
        }
        for stored, n_sums, left in sums
    ]
    return [
        *(("batch_kernels", "frame", constants) for constants in frames),
        ("batch_kernels", "gather", {"block": TILE}),
        ("batch_kernels", "provenance", {"block": triton_executor.SUM_BLOCK}),
        *(("reward_kernels", "sum_rewards", constants) for constants in rewards),
        ("tree_kernels", "find", {"block": tree_launches.BLOCK}),
        ("tree_kernels", "draw", {"block": tree_launches.BLOCK}),
        ("tree_kernels", "put", {"block": tree_launches.PUT_BLOCK}),
    ]


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1: nothing is compiled")
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_ahead_of_time(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for module, name, constants in specialisations(triton.language):
        kernels = selection.device_kernels(torch.device("cuda"), module)
        kernel = getattr(kernels, name)
        kinds = {argument: "constexpr" if argument in constants else "i64" for argument in kernel.arg_names}
        source = ASTSource(kernel, kinds, constants)
        compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options={"enable_fp_fusion": False})
        text, binary = ("ptx", "cubin") if target.startswith("sm") else ("amdgcn", "hsaco")
        assert compiled.asm[binary], name
        if name == "gather":  # wide rows are copied 16 bytes at a time
            assert ("ld.global.v2.b64" if text == "ptx" else "global_load_dwordx4") in compiled.asm[text]
        if name == "sum_rewards":
            assert not any(word in compiled.asm[text] for word in ("fma.rn", "v_fma_f", "v_fmac_f")), name


# ---- without kernels


def test_tensor_operations_serve_where_triton_is_missing_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = small_store("no-triton", 8)
    reader = Reader(store, compiled=False)
    program = BatchProgram.of(reader.schema, Windows(length=2))
    assert type(new_executor(reader.assembler.index, program)) is TorchExecutor
    monkeypatch.setattr(selection, "is_interpreted", True)

    for triton in (None, SimpleNamespace(__version__="3.1.0")):

        def found(name: str, triton: Any = triton) -> Any:
            if name != "triton" or triton is None:
                raise ImportError(name)
            return triton

        monkeypatch.setattr(selection, "import_module", found)
        assert selection.device_kernels(torch.device("cuda")) is None
        assert type(new_executor(reader.assembler.index, program)) is TorchExecutor


def test_importing_trajstore_does_not_import_triton() -> None:
    code = "import sys, trajstore.sampling.reader; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


# ---- on a GPU

KINDS = [
    Windows(length=6, burn_in=2, bootstrap=1, boundary="pad_both", pad="zero"),
    Windows(length=4, weight="episode", n_step=(1, 3), next_fields=("obs",)),
    Windows(length=2, offsets={"obs": (-2, -1, 0)}, provenance=True),
    Windows.transitions(n_step=3),
]


def on_gpu(windows: Windows) -> tuple[Reader, TritonExecutor]:
    store, _ = small_store("triton-gpu", 20)
    reader = Reader(store, device="cuda")
    list(reader.epoch(64, Windows(next_fields="final")))
    executor = reader.assembler.kind(windows).executor
    assert isinstance(executor, TritonExecutor)
    return reader, executor


@pytest.mark.cuda
@needs_gpu
@needs_triton
@pytest.mark.parametrize("windows", KINDS)
def test_batches_on_a_gpu_have_the_bits_of_the_cpu(windows: Windows) -> None:
    reader, executor = on_gpu(windows)
    starts, cache = reader.assembler.kind(windows).starts, reader.assembler.cache
    executor.run(cache, starts, (16, CounterRng(1), 0), {})  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        with counted_launches() as names:
            got = executor.run(cache, starts, (16, CounterRng(2), 0), {})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got is not None
    assert len(names) <= 4
    store, _ = small_store("triton-gpu", 20)
    expected = flat_outputs(Reader(store, seed=2).sample(16, windows))
    for key, value in expected.items():
        assert torch.equal(got[key].cpu(), value), key


@pytest.mark.cuda
@needs_gpu
@needs_triton
def test_a_cuda_graph_draws_the_next_batch_at_each_replay() -> None:
    windows = Windows.transitions(n_step=3)
    reader, executor = on_gpu(windows)
    starts, cache, rng = reader.assembler.kind(windows).starts, reader.assembler.cache, CounterRng(5)
    counter = DeviceCounter(rng, torch.device("cuda"))
    outs = executor.run(cache, starts, (16, CounterRng(1), 0), {})
    assert outs is not None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        executor.run(cache, starts, (16, counter, 0), outs)
    for _ in range(3):
        graph.replay()
        expected = executor.run(cache, starts, (16, rng, 0), {})
        assert expected is not None
        assert all(torch.equal(outs[key], value) for key, value in expected.items())
