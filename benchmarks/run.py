"""Run every benchmark, one after the other, and write results.json beside this file."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from _harness import arguments

BENCHMARKS = (
    "append",
    "commit",
    "open",
    "frames",
    "memory",
    "windows",
    "loops",
    "cold_rows",
    "pack",
    "misses",
    "disk_cache",
    "scans",
    "verify",
    "viewer",
    "priorities",
    "replay",
    "ranks",
    "ray_service",
    "drop_ins",
    "rlinf_add_checkpoint",
    "torchrl_storage",
    "object_store",
)


def main() -> None:
    args = arguments(__doc__)
    here = Path(__file__).parent
    results = {}
    for name in BENCHMARKS:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / f"{name}.json"
            command = [sys.executable, str(here / f"{name}.py"), "--json", str(path)]
            subprocess.run(command + ["--small"] * args.small, check=True)
            results[name] = json.loads(path.read_text())
    (args.json or here / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
