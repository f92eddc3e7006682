"""The check for machines with a GPU: what it says without one, and that its parts work on the CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from trajstore import Windows

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.py"


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    command = [str(ROOT / "scripts" / "gpu_check"), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="Triton is not installed: it would be downloaded"
)
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run(cwd=tmp_path)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
    assert not list(tmp_path.iterdir())


def test_it_checks_bits_on_the_cpu_and_writes_a_report(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--quick", "--out", str(tmp_path / "report.json")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["is_correct"]
    assert report["facts"]["device"] == "cpu"
    assert all(not row["differs"] for row in report["batches"].values())
    assert len(report["batches"]) > 10
    assert "loops" not in report  # nothing is measured without a GPU
    if importlib.util.find_spec("triton"):
        assert report["facts"]["kernels"] == "Triton"
        assert max(row["launches"] or 0 for row in report["batches"].values()) <= 4
        assert report["tree"]["launches"] == 2


def test_a_single_bit_is_noticed(script: ModuleType) -> None:
    value = torch.arange(6, dtype=torch.float32)
    other = value.clone()
    other.view(torch.int32)[3] += 1
    assert script.same({"x": value}, {"x": value.clone()}) == []
    assert script.same({"x": value}, {"x": other}) == ["x"]
    assert script.same({"x": value}, {"x": value, "y": value}) == ["y"]


@pytest.mark.parametrize("kind", ["windows", "transitions", "prioritised"])
def test_loops_of_both_libraries_run(kind: str, script: ModuleType) -> None:
    store: Any = script.make_store(300, (3,), "float32", 30)
    windows = Windows(length=4) if kind == "windows" else Windows.transitions()
    _, ours = script.ours_of(store, "cpu", kind, 8, windows)
    actions = [ours]
    with contextlib.suppress(RuntimeError):  # TorchRL's trees need an extension that some installations lack
        actions.append(script.torchrl_buffer(store, "cpu", kind, 8, windows.size))
    for action in actions:
        if action is not None:
            assert script.milliseconds(action, 0.0) > 0
