"""How much memory does a writer take, however much is appended? Peak RSS of a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from _atari import frames, noise, stacked
from _harness import Report, arguments, scratch

import trajstore
from trajstore.arguments import parse_bytes

CASES = {
    "frame episodes": "append_episode of 84x84x4 frames, real and noise in turn",
    "frame steps": "append of 84x84x4 frames one by one, real and noise in turn",
    "64 environments": "append(envs=...) of 84x84 frames, placed by environment",
    "narrow rows": "append_rollout of one-byte steps",
}
SHARES = {"frame episodes": 1.0, "frame steps": 0.2, "64 environments": 0.2, "narrow rows": 0.01}


def status(key: str) -> int:
    """A figure of this process in bytes, from the kernel."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def append_episodes(writer: trajstore.Writer, n_bytes: int) -> int:
    blocks = [stacked("Breakout", 250), noise(250, (84, 84, 4))]
    n = -(-n_bytes // blocks[0].nbytes)
    for i in range(n):
        writer.append_episode({"observation": blocks[i % 2]}, truncated=True)
    return n * blocks[0].nbytes


def append_steps(writer: trajstore.Writer, n_bytes: int) -> int:
    rows = [row for pair in zip(stacked("Breakout", 100), noise(100, (84, 84, 4)), strict=True) for row in pair]
    n = -(-n_bytes // rows[0].nbytes)
    for i in range(n):
        writer.append({"observation": rows[i % len(rows)]}, truncated=i % 1000 == 999)
    return n * rows[0].nbytes


def append_vector(writer: trajstore.Writer, n_bytes: int) -> int:
    blocks = [frames("Breakout", 64), noise(64, (84, 84))]
    n = -(-n_bytes // blocks[0].nbytes)
    for i in range(n):
        writer.append({"observation": blocks[i % 2]}, envs=range(64), truncated=np.full(64, i % 100 == 99))
    return n * blocks[0].nbytes


def append_narrow(writer: trajstore.Writer, n_bytes: int) -> int:
    ends = np.zeros((1000, 100), bool)
    ends[-1] = True
    data = {"observation": np.random.default_rng(0).integers(0, 18, ends.shape, np.uint8)}
    n = -(-n_bytes // ends.size)
    for _ in range(n):
        writer.append_rollout(data, truncated=ends)
    return n * ends.size


APPENDS = dict(zip(CASES, (append_episodes, append_steps, append_vector, append_narrow), strict=True))


def child(case: str, directory: str, n_bytes: int) -> None:
    """Append in this process, print what it took as JSON."""
    append = APPENDS[case]
    with trajstore.create(f"{directory}/warm", fsync=False).writer() as writer:
        append(writer, 1)  # everything imported, loaded and recorded
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS")
    with trajstore.create(f"{directory}/store", fsync=False).writer() as writer:
        appended = append(writer, n_bytes)
    print(json.dumps({"appended": appended, "growth": status("VmHWM") - before}))


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    args = arguments(__doc__)
    report = Report("memory", "how much memory does a writer take?", args.small)
    bound = parse_bytes(trajstore.WriterOptions().buffer_bytes, "buffer_bytes")
    for case, isolates in CASES.items():
        n_bytes = int((3e8 if args.small else 1e10) * SHARES[case])
        with scratch() as directory:
            command = [sys.executable, __file__, "--child", case, str(directory), str(n_bytes)]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        appended, growth = found["appended"], found["growth"]
        report.fact(
            case, isolates, appended_mb=appended / 1e6, peak_growth_mb=growth / 1e6, buffer_bytes_mb=bound / 1e6
        )
        report.ratio(f"{case}: peak growth over buffer_bytes", growth / bound, 1.5, at_most=True)
    report.finish(args.json)


if __name__ == "__main__":
    main()
