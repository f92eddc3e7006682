"""Does `verify` keep up with what this machine can decode?

Against nothing but checking and decoding the same chunks, which are in memory already, into preallocated buffers,
with as many threads: CRC-32C and numcodecs for compressed columns, CRC-32C and one copy for raw ones. `verify` also
reads the files (from the page cache), checks records, span tables and returns, and looks for leftovers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import crc32c
import numcodecs.blosc
import numcodecs.zstd
import numpy as np
from _atari import frames
from _harness import Case, Report, arguments, scratch, stopwatch

import trajstore
from trajstore import Field
from trajstore.format.array_layout import ArrayLayout
from trajstore.schema import Array
from trajstore.storage import LocalStorage
from trajstore.store.verify import verify

TARGET = 0.7
THREADS = LocalStorage.n_threads
OBSERVATIONS = {
    "state, raw": Field("float32", (64,), codec="none"),
    "state, blosc-lz4": Field("float32", (64,), codec="blosc-lz4:5"),
    "frames": Field("uint8", (84, 84)),
}
Chunks = list[tuple[ArrayLayout, bytes]]


def main() -> None:
    options = arguments(__doc__, add_options)
    report = Report("verify", "how fast is a store verified, beside decoding its chunks?", options.small)
    n_mb = 8 if options.small else options.mb
    with scratch() as directory:
        for kind, observation in OBSERVATIONS.items():
            schema = {"observation": observation, "reward": Field("float32", ())}
            compare(report, kind, schema, directory / kind, n_mb * 10**6, 1 if options.small else options.rounds)
    report.notes.append(f"{THREADS} threads each; sizes are of decoded data; files are in the page cache")
    report.finish(options.json)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mb", type=int, default=1000, help="decoded megabytes of each store")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each case")


def compare(report: Report, kind: str, schema: dict[str, Field], path: Path, n_bytes: int, rounds: int) -> None:
    write(path, schema, n_bytes)
    chunks = encoded_chunks(path)
    n_decoded = sum(layout.chunk_bytes for layout, _ in chunks)
    ours, theirs = f"{kind}: verify", f"{kind}: decode"
    cases = [
        Case(ours, "reading, checking and decoding a whole store", checked(path), n_bytes=n_decoded),
        Case(theirs, "checksums and decoding alone", decoded(chunks), n_bytes=n_decoded),
    ]
    report.run(cases, rounds, sync=False)
    report.speedup(f"{kind}: speed of verify / speed of decoding", ours, theirs, TARGET)


def write(path: Path, schema: dict[str, Field], n_bytes: int) -> None:
    rng, n = np.random.default_rng(0), 1000
    row_bytes = sum(spec.row_bytes for spec in schema.values())
    images = frames("Breakout", n) if schema["observation"].dtype == "uint8" else None
    store = trajstore.create(path, schema)
    with store.writer(commit_steps=10 * n) as writer:
        for _ in range(max(1, n_bytes // (row_bytes * n))):
            walk = rng.standard_normal((n, 64)).cumsum(0).round(1).astype(np.float32)
            observation = walk if images is None else np.roll(images, rng.integers(84), axis=2)
            writer.append_episode({"observation": observation, "reward": rng.random(n).astype(np.float32)})


def encoded_chunks(path: Path) -> Chunks:
    """All chunks of the fields, in memory."""
    found: Chunks = []
    for stream in trajstore.open(path).snapshot.readers:
        for name, layout in stream.record.layouts.items():
            if name.startswith("steps/"):
                n_chunks = -(-stream.record.length(name) // layout.chunk_rows)
                found += [(layout, bytes(stream.chunk(name, i, bytearray()))) for i in range(n_chunks)]
    return found


def checked(path: Path) -> Callable[[Path], float]:
    def run(_: Path) -> float:
        with stopwatch() as watch:
            report = verify(path)
        assert report.is_clean, report
        return watch.seconds

    return run


def decoded(chunks: Chunks) -> Callable[[Path], float]:
    shares = [chunks[i::THREADS] for i in range(THREADS)]
    buffers = [np.empty(max(layout.chunk_bytes for layout, _ in chunks), np.uint8) for _ in shares]

    def run(_: Path) -> float:
        with ThreadPoolExecutor(THREADS) as threads, stopwatch() as watch:
            list(threads.map(decode_all, shares, buffers))
        return watch.seconds

    return run


def decode_all(chunks: Chunks, buffer: Array) -> None:
    for layout, data in chunks:
        body, out = memoryview(data)[:-4], buffer[: layout.chunk_bytes]
        assert crc32c.crc32c(body) == int.from_bytes(data[-4:], "little")
        if layout.codec.name == "blosc":
            numcodecs.blosc.decompress(body, out)
        elif layout.codec.name == "zstd":
            numcodecs.zstd.decompress(body, out)
        else:
            out[:] = np.frombuffer(body, np.uint8)


if __name__ == "__main__":
    main()
