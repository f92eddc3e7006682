"""How small do real Atari frames become, how fast are they read back, and which chunk is best?"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from _atari import GAMES, frames, noise, stacked
from _harness import Report, arguments, scratch, stopwatch, tree_bytes

import trajstore

CODECS = ("zstd:1", "zstd:3", "blosc-lz4")
CHUNK_ROWS = (8, 16, 32, 64)
EPISODE = 500
Array = np.ndarray[Any, np.dtype[Any]]


def recorded(directory: Path, data: Array, field: trajstore.Field) -> dict[str, float]:
    """Write the frames as episodes; how long, how many bytes for one, how fast back."""
    store = trajstore.create(directory, trajstore.Schema({"frame": field}), fsync=False)
    with stopwatch() as writing, store.writer(commit_seconds=None) as writer:
        for start in range(0, len(data), EPISODE):
            writer.append_episode({"frame": data[start : start + EPISODE]}, truncated=True)
    store.refresh()
    speeds = []
    for i in range(len(store)):
        with stopwatch() as reading:
            episode = store.read_episode(i)
        speeds.append(episode["frame"].nbytes / reading.seconds / 1e9)
        if not np.array_equal(episode["frame"], data[i * EPISODE : (i + 1) * EPISODE]):
            raise AssertionError("read back other frames than written")
    on_disk = tree_bytes(directory)
    return {
        "raw_mb": data.nbytes / 1e6,
        "disk_mb": on_disk / 1e6,
        "raw_over_disk": data.nbytes / on_disk,
        "write_gb_s": data.nbytes / writing.seconds / 1e9,
        "read_gb_s": statistics.median(speeds),
    }


def kinds(game: str, n: int) -> dict[str, Array]:
    """The three forms in which frames are recorded."""
    stack = stacked(game, n)
    return {
        "84x84": frames(game, n),
        "84x84x4": stack,
        "4x84x84": np.ascontiguousarray(np.moveaxis(stack, -1, 1)),
    }


def measure(report: Report, name: str, isolates: str, data: Array, **layout: Any) -> None:
    with scratch() as directory:
        os.sync()
        field = trajstore.Field("uint8", data.shape[1:], **layout)
        report.fact(name, isolates, **recorded(directory / "store", data, field))


def by_game(report: Report, games: tuple[str, ...], n: int) -> None:
    """Every game in every form, as the defaults store it."""
    for game in games:
        for kind, data in kinds(game, n).items():
            measure(report, f"{kind} {game}", "default codec and chunk", data)
    for shape in ((84, 84), (84, 84, 4)):
        name = "x".join(map(str, shape))
        measure(report, f"{name} noise", "nothing to compress", noise(n // 4, shape))


def by_layout(report: Report, games: tuple[str, ...], n: int, chunks: tuple[int, ...]) -> dict[str, float]:
    """Every codec and chunk over all games; returns the geometric mean of raw over disk by layout."""
    means = {}
    for kind in ("84x84", "84x84x4"):
        for codec in CODECS:
            for rows in chunks:
                layout = f"{kind} {codec} x {rows}"
                means[layout] = _pooled(report, layout, [kinds(g, 2 * n)[kind][:n] for g in games], codec, rows)
    return means


def _pooled(report: Report, layout: str, data: list[Array], codec: str, rows: int) -> float:
    found = []
    for part in data:
        with scratch() as directory:
            field = trajstore.Field("uint8", part.shape[1:], codec=codec, chunk_rows=rows)
            found.append(recorded(directory / "store", part, field))
    totals = {key: sum(f[key] for f in found) for key in ("raw_mb", "disk_mb")}
    mean = float(np.exp(np.mean([np.log(f["raw_over_disk"]) for f in found])))
    report.fact(
        f"all games, {layout}",
        f"codec and chunk ({part.nbytes // len(part) * rows / 1024:,.0f} KiB)",
        **totals,
        raw_over_disk=mean,
        write_gb_s=statistics.median(f["write_gb_s"] for f in found),
        read_gb_s=statistics.median(f["read_gb_s"] for f in found),
    )
    return mean


def main() -> None:
    args = arguments(__doc__)
    report = Report("frames", "how small do real Atari frames become?", args.small)
    games, n = (GAMES[:1], 100) if args.small else (GAMES, 2000)
    by_game(report, games, n)
    means = by_layout(report, games, n // 2, CHUNK_ROWS[:1] if args.small else CHUNK_ROWS)
    for kind in ("84x84", "84x84x4"):
        ratios = [report.cases[f"{kind} {game}"]["raw_over_disk"] for game in games]
        report.ratio(f"{kind}: raw over disk, geometric mean of games", float(np.exp(np.mean(np.log(ratios)))), 40)
        report.ratio(f"{kind}: raw over disk, worst game", min(ratios), 40)
        best = max((layout for layout in means if layout.startswith(f"{kind} zstd:1")), key=means.__getitem__)
        default = trajstore.format.array_layout.chunk_rows_for(
            trajstore.Field("uint8", tuple(map(int, kind.split("x")))), is_compressed=True
        )
        report.notes.append(f"{kind}: {best} is smallest with zstd:1; the default is {default} rows a chunk")
    report.notes.append("all games: geometric mean of the games' ratios, medians of their speeds; fsync off")
    report.finish(args.json)


if __name__ == "__main__":
    main()
