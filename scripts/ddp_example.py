"""Train on several ranks, and survive the loss of machines: two ranks are killed, three continue, then one.

Every rank writes its own stream of one store, learns with the others (DistributedDataParallel over gloo), and takes
part in checkpoints that hold all ranks or nothing. For each number of ranks, the episodes are redistributed; no
step is copied.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import trajstore

_WORKER = Path(__file__).with_name("_ddp_worker.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(folder: Path, n_ranks: int, n_steps: int) -> subprocess.Popen[bytes]:
    """Start this many ranks with torchrun, in a separate process group."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={n_ranks}"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", str(_WORKER), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / f"{n_ranks}-ranks.log").open("wb") as log:
        return subprocess.Popen(
            [*command, f"--steps={n_steps}"], stdout=log, stderr=log, env=environment, start_new_session=True
        )


def events(folder: Path, n_ranks: int) -> list[dict[str, Any]]:
    """Return the events that the ranks of a launch have reported so far."""
    texts = [path.read_text() for path in sorted(folder.glob(f"{n_ranks}-ranks.*.jsonl"))]
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def kill_after(process: subprocess.Popen[bytes], folder: Path, n_ranks: int, n_saved: int) -> None:
    """Kill all ranks without warning, once each has seen ``n_saved`` checkpoints published."""
    try:
        while sum(event["event"] == "saved" for event in events(folder, n_ranks)) < n_saved * n_ranks:
            if process.poll() is not None:
                raise RuntimeError(f"the ranks ended before they were killed; see {folder}/{n_ranks}-ranks.log")
            time.sleep(0.05)
    finally:
        kill(process, [event["pid"] for event in events(folder, n_ranks) if event["event"] == "begin"])


def kill(process: subprocess.Popen[bytes], pids: Iterable[int]) -> None:
    """Kill a launch and its ranks at once; torchrun starts the ranks in separate sessions."""
    if process.poll() is None:
        for pid in (process.pid, *pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def finish(process: subprocess.Popen[bytes], folder: Path, n_ranks: int, timeout_s: float) -> None:
    try:
        if process.wait(timeout_s):
            raise RuntimeError(f"a rank failed; see {folder}/{n_ranks}-ranks.log")
    finally:
        kill(process, [event["pid"] for event in events(folder, n_ranks) if event["event"] == "begin"])


def run(folder: Path, timeout_s: float = 300.0) -> list[dict[str, Any]]:
    """Train on two ranks, kill them, continue with three and then with one; return one row per launch."""
    kill_after(launch(folder, 2, 1_000_000), folder, 2, n_saved=3)
    rows = [row(folder, 2)]
    for n_ranks in (3, 1):
        store = trajstore.open(folder / "store")
        step = int(store.checkpoints[-1].name.partition("-")[2])
        finish(launch(folder, n_ranks, step + 20), folder, n_ranks, timeout_s)
        rows.append(row(folder, n_ranks))
    return rows


def row(folder: Path, n_ranks: int) -> dict[str, Any]:
    """Summarize a launch."""
    found = events(folder, n_ranks)
    begun = [event for event in found if event["event"] == "begin"]
    saved = [event for event in found if event["event"] == "saved"]
    last = max(event["step"] for event in saved)
    return {
        "n_ranks": n_ranks,
        "from": begun[0]["step"],
        "taken_over": [event["n_steps"] for event in sorted(begun, key=lambda event: event["rank"])],
        "dropped": sum(event["dropped"] for event in begun),
        "saved": last,
        "n_steps": sum(event["n_steps"] for event in saved if event["step"] == last),
        "loss": next(event["loss"] for event in saved if event["step"] == last),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, help="directory for store, models and logs (default: a temporary one)"
    )
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp(prefix="trajstore-ddp-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{'ranks':>5}  {'from step':>9}  {'steps received, by rank':<30}  {'saved at':>8}  {'steps':>7}  loss")
    for r in run(folder):
        taken = " + ".join(map(str, r["taken_over"]))
        print(
            f"{r['n_ranks']:>5}  {r['from']:>9}  {taken:<30}  {r['saved']:>8}  {r['n_steps']:>7}  {r['loss']:.3f}"
        )
    print(f"store: {folder / 'store'}")


if __name__ == "__main__":
    main()
