"""Record CartPole episodes into a store, read them back in two ways, and draw what happened."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import gymnasium as gym
import numpy as np
import zarr
from gymnasium.vector import AutoresetMode
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import trajstore
from trajstore import Field, Schema, Store

Array = np.ndarray[Any, np.dtype[Any]]
OnEpisode = Callable[[int, int], None]  # episodes recorded so far, steps of the newest

ROOT = Path(__file__).resolve().parent.parent
TASK = "CartPole-v1"
MAX_STEPS = 500  # where CartPole-v1 truncates
GAINS = np.array([0.1, 0.3, 3.0, 1.0])  # of position, speed, angle, angular speed
NOISE = (1.0, 0.3)  # share of random actions in the first and in the last episode
CONTROLLED = -1  # in a plan: this action is the controller's
HEIGHT, WIDTH = 48, 64
COLOURS = {"terminated": "#c8553d", "truncated": "#2a6f97", "cut": "#8a8a8a"}

SCHEMA = Schema(
    {
        "observation": {
            "state": Field("float32", (4,), final=True),
            "pixels": Field("uint8", (HEIGHT, WIDTH), final=True),
        },
        "action": Field("int64"),
        "reward": Field("float32"),
    },
    episode={"noise": float},
)


# ---- the policy: random at first, good in the end ------------------------------------------------------------


def noise_of(episode: int, n_episodes: int) -> float:
    """Share of random actions in an episode; falls from the first to the last."""
    return float(np.interp(episode, [0, max(n_episodes - 1, 1)], NOISE))


def plan(seed: int, episode: int, n_episodes: int) -> Array:
    """For each step of an episode a random action, or `CONTROLLED`.

    It depends on nothing but its arguments, so an episode can be repeated on its own.
    """
    rng = np.random.default_rng([seed, episode])
    is_random = rng.random(MAX_STEPS) < noise_of(episode, n_episodes)
    return np.where(is_random, rng.integers(0, 2, MAX_STEPS), CONTROLLED)


def act(state: Array, planned: Array) -> Array:
    """Push towards where the pole falls, unless the plan says otherwise."""
    return np.where(planned == CONTROLLED, state @ GAINS > 0, planned).astype(np.int64)


# ---- frames --------------------------------------------------------------------------------------------------


def draw(state: Array) -> Array:
    """Grey frames ``[n, HEIGHT, WIDTH]`` of states ``[n, 4]``; the pole is drawn twice as long as it is."""
    row, column = np.ogrid[:HEIGHT, :WIDTH]
    floor, pole = HEIGHT - 12, 26.0
    x = (WIDTH / 2 + state[:, 0] * WIDTH / 5.6)[:, None, None]
    sin, cos = np.sin(state[:, 2])[:, None, None], np.cos(state[:, 2])[:, None, None]
    along = np.clip((column - x) * sin - (row - floor) * cos, 0, pole)
    distance = np.hypot(column - x - along * sin, row - floor + along * cos)
    frames = 255 - 150 * np.clip(2 - distance, 0, 1)
    is_cart = (np.abs(column - x) < 7) & (row >= floor) & (row < floor + 6)
    frames = np.where(is_cart, 40, frames)
    frames[:, floor + 6] = 120
    return frames.astype(np.uint8)


def observe(state: Array) -> dict[str, Array]:
    return {"state": state, "pixels": draw(state)}


# ---- recording -----------------------------------------------------------------------------------------------


def record(
    url: str | Path,
    *,
    n_episodes: int = 300,
    n_envs: int = 16,
    seed: int = 0,
    on_episode: OnEpisode | None = None,
) -> Store:
    """Record whole episodes of CartPole, from several environments at once, into a new store.

    Args:
        url: Where to create the store: a path or any fsspec URL.
        n_episodes: How many; every one is recorded to its end.
        n_envs: Environments that run side by side.
        seed: The same seed gives the same episodes.
        on_episode: Called at each end with the episodes recorded so far and the steps of this one.
    """
    store = trajstore.create(url, SCHEMA)
    # The observation returned with an end is then already the next episode's first; the last one is in the info.
    options = {"autoreset_mode": AutoresetMode.SAME_STEP}
    n_envs = min(n_envs, n_episodes)
    envs = gym.make_vec(TASK, num_envs=n_envs, vectorization_mode="sync", vector_kwargs=options)
    with contextlib.closing(envs), store.writer("cartpole", commit_steps=4096) as writer:
        _run(envs, writer, n_episodes, seed, on_episode or (lambda done, steps: None))
    store.refresh()
    return store


def _run(envs: Any, writer: trajstore.Writer, n_episodes: int, seed: int, on_episode: OnEpisode) -> None:
    n_envs = envs.num_envs
    waiting = iter(range(n_envs, n_episodes))
    done = itertools.count(1)
    episode = np.arange(n_envs)
    plans = np.stack([plan(seed, k, n_episodes) for k in episode])
    t = np.zeros(n_envs, int)
    active = np.arange(n_envs)  # the others go on stepping, but nobody records them
    state, _ = envs.reset(seed=seed)
    while len(active):
        action = act(state, plans[np.arange(n_envs), t])
        following, reward, terminated, truncated, info = envs.step(action)
        step = {
            "observation": observe(state[active]),
            "action": action[active],
            "reward": reward[active].astype(np.float32),
        }
        writer.append(step, envs=active)
        t += 1
        for env in active[(terminated | truncated)[active]]:
            writer.end_episode(
                int(env),
                terminated=bool(terminated[env]),
                truncated=bool(truncated[env]),
                final={"observation": _first(observe(info["final_obs"][env][None]))},
                metadata={"noise": noise_of(int(episode[env]), n_episodes)},
            )
            on_episode(next(done), int(t[env]))
            episode[env] = next(waiting, -1)
            if episode[env] >= 0:
                plans[env] = plan(seed, int(episode[env]), n_episodes)
        t[terminated | truncated] = 0
        active = np.flatnonzero(episode >= 0)
        state = following


def _first(values: dict[str, Array]) -> dict[str, Array]:
    return {name: value[0] for name, value in values.items()}


# ---- reading back --------------------------------------------------------------------------------------------


def read_with_zarr(url: str | Path) -> Iterator[tuple[str, int, dict[str, Array]]]:
    """Every episode as stream, number and rows of each field, by plain zarr alone.

    A stream's ``spans/ints`` says which rows belong to which episode; an episode's last row holds only its final
    observation, so the other fields end one row earlier.
    """
    streams: Any = zarr.open_group(str(url), mode="r")["streams"]
    for name, stream in streams.groups():
        spans = stream["spans/ints"]
        columns = dict(zip(spans.attrs["columns"], spans[:].T, strict=True))
        fields = {path: stream[f"steps/{path}"][:] for path in SCHEMA}
        for episode in np.unique(columns["episode"]):
            mine = np.flatnonzero(columns["episode"] == episode)
            ranges = zip(columns["row_start"][mine], columns["row_stop"][mine], strict=True)
            rows = np.concatenate([np.arange(start, stop) for start, stop in ranges])
            n_steps = len(rows) - columns["has_final"][mine[-1]]
            yield name, int(episode), {p: a[rows if SCHEMA[p].final else rows[:n_steps]] for p, a in fields.items()}


def verify(store: Store, url: str | Path) -> int:
    """Check that trajstore and plain zarr see the same bytes; returns how many.

    Raises:
        RuntimeError: They do not.
    """
    n_bytes = n_episodes = 0
    for stream, episode, ours in read_with_zarr(url):
        theirs = store.read_episode((stream, episode))
        theirs |= {f"observation/{name}": value for name, value in theirs.pop("observation").items()}
        for path, rows in ours.items():
            if rows.dtype != theirs[path].dtype or rows.tobytes() != theirs[path].tobytes():
                raise RuntimeError(f"episode {episode} of {stream}: zarr reads '{path}' differently")
            n_bytes += rows.nbytes
        n_episodes += 1
    if n_episodes != len(store):
        raise RuntimeError(f"zarr sees {n_episodes} episodes, trajstore {len(store)}")
    return n_bytes


def stored_bytes(url: str | Path) -> int:
    filesystem, path = fsspec.core.url_to_fs(str(url))
    return int(filesystem.du(path))


# ---- showing -------------------------------------------------------------------------------------------------


def running_mean(values: Array, n: int) -> Array:
    """Mean of each value and of up to ``n - 1`` before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(stop - n, 0)
    means: Array = (sums[stop] - sums[start]) / (stop - start)
    return means


def plot(store: Store, path: Path) -> None:
    """Returns, lengths, and frames of the first and of the last episode, as a PNG."""
    figure = Figure(figsize=(11, 7.2), layout="constrained")
    top, bottom = np.asarray(figure.subfigures(2, 1, height_ratios=[1.5, 1]))
    returns_axes, lengths_axes = top.subplots(1, 2, width_ratios=[1.7, 1])
    _plot_returns(returns_axes, store)
    _plot_lengths(lengths_axes, store)
    _plot_frames(bottom, store)
    figure.savefig(path, dpi=130)


def _plot_returns(axes: Any, store: Store) -> None:
    returns, ends = store.episodes["return"], store.episodes["end"]
    for end in sorted(set(ends)):
        at = np.flatnonzero(ends == end)
        axes.scatter(at, returns[at], s=14, alpha=0.65, linewidths=0, color=COLOURS[end], label=end)
    n = max(len(returns) // 12, 2)
    axes.plot(running_mean(returns, n), color="#222222", linewidth=1.8, label=f"mean of {n}")
    axes.set(title="Return of each episode", xlabel="episode", ylabel="return", ylim=(0, MAX_STEPS * 1.06))
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _plot_lengths(axes: Any, store: Store) -> None:
    lengths, ends = store.episodes["length"], store.episodes["end"]
    kinds = sorted(set(ends))
    axes.hist(
        [lengths[ends == end] for end in kinds],
        bins=np.linspace(0, MAX_STEPS, 21).tolist(),
        stacked=True,
        color=[COLOURS[end] for end in kinds],
        label=kinds,
    )
    axes.set(title="How long episodes last", xlabel="steps", ylabel="episodes")
    axes.legend(loc="upper center", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _plot_frames(figure: Any, store: Store, n_frames: int = 8) -> None:
    grid = figure.subplots(2, n_frames)
    for row, episode in zip(grid, (0, len(store) - 1), strict=True):
        about = store.episodes.row(episode)
        pixels = store.read_episode(episode, fields=["observation/pixels"])["observation"]["pixels"]
        times = np.linspace(0, len(pixels) - 1, n_frames).round().astype(int)
        for axes, t in zip(row, times, strict=True):
            axes.imshow(pixels[t], cmap="gray", vmin=0, vmax=255)
            axes.set_title(f"t = {t}", fontsize=9)
            axes.set(xticks=[], yticks=[])
        row[0].set_ylabel(f"episode {episode}\n{about['end']}", fontsize=9)
    figure.suptitle("Frames of the first and of the last episode", fontsize=12)


def summary(store: Store, seconds: dict[str, float], n_verified: int, url: str | Path) -> Table:
    episodes = store.episodes
    n_steps, on_disk = int(episodes["length"].sum()), stored_bytes(url)
    raw = store.snapshot.n_rows * SCHEMA.row_bytes
    ends = ", ".join(f"{int((episodes['end'] == end).sum())} {end}" for end in sorted(set(episodes["end"])))
    quarters = [f"{part.mean():.0f}" for part in np.array_split(episodes["return"], 4) if len(part)]
    table = Table(title=f"{TASK} in {store.url}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("episodes", f"{len(store):,} ({ends})")
    table.add_row("steps", f"{n_steps:,}, each with state, {HEIGHT} x {WIDTH} frame, action and reward")
    table.add_row("mean return by quarter", " → ".join(quarters))
    table.add_row("commits", f"{sum(stream.commit for stream in store.streams)} while recording")
    table.add_row("bytes", f"{mib(on_disk)} stored, {mib(raw)} raw: {raw / on_disk:.0f} times smaller")
    table.add_row("same bytes in plain zarr", f"yes, {mib(n_verified)} compared")
    rate = n_steps / seconds["recorded"]
    took = ", ".join(f"{what} in {s:.1f} s" for what, s in seconds.items())
    table.add_row("time", f"{took}; {rate:,.0f} steps/s, environments and drawing included")
    return table


def mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.1f} MiB"


def short(path: str | Path) -> str:
    """The path as one would type it here; URLs as they are."""
    if "://" in str(path):
        return str(path)
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative


def next_steps(url: str, image: Path) -> str:
    where = short(url)
    found = f"\nStore:   {where}\nPicture: {short(image)}\n"
    if url.startswith("memory:"):
        return found  # gone with this process, so there is nothing to try
    return f"""{found}
Try next, with {short(sys.executable)}:

  import trajstore
  store = trajstore.open({where!r})
  store.episodes.to_pandas()                           # one row an episode
  store.read_episode(0, fields=["action"], stop=10)    # a few steps of one field

  import zarr                                          # the same store, without trajstore
  zarr.open_group({where!r}, mode="r").tree()

Or open notebooks/explore_a_store.ipynb, with TRAJSTORE_DEMO={url if "://" in url else Path(url).resolve()}
"""


# ---- the command ---------------------------------------------------------------------------------------------


def fresh(path: Path) -> Path:
    """The path, or the first of path-2, path-3, ... at which neither a store nor a picture is."""
    path = path.resolve()
    names = itertools.chain([path], (path.with_name(f"{path.name}-{n}") for n in itertools.count(2)))
    return next(p for p in names if not _is_taken(p) and not picture_of(p).exists())


def _is_taken(path: Path) -> bool:
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))


def picture_of(path: Path) -> Path:
    # Beside the store, not in it: everything inside a store is Zarr.
    return path.with_name(f"{path.name}.png")


def natural(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a number from {least}, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    return natural(text, 1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Record CartPole episodes into a store while a policy gets better, read them back with "
        "trajstore and with plain zarr, check that both see the same bytes, and draw what happened.",
        epilog="Without options: 300 episodes into runs/demo, in well under a minute.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "runs" / "demo",
        metavar="DIR",
        help="directory for the store, the picture beside it; if taken, DIR-2, DIR-3, ... (default: runs/demo)",
    )
    parser.add_argument(
        "--url",
        help="put the store at this fsspec URL instead (memory://x, s3://bucket/x, ...); the picture goes by --out",
    )
    parser.add_argument(
        "--episodes", type=positive, default=300, metavar="N", help="episodes to record (default: 300)"
    )
    parser.add_argument(
        "--envs", type=positive, default=16, metavar="N", help="environments side by side (default: 16)"
    )
    parser.add_argument(
        "--seed", type=natural, default=0, metavar="N", help="same seed, same episodes (default: 0)"
    )
    return parser.parse_args(argv)


def record_with_progress(console: Console, url: str, args: argparse.Namespace) -> Store:
    counts = TextColumn("episodes, {task.fields[steps]:,} steps")
    columns = (TextColumn("recording"), BarColumn(), MofNCompleteColumn(), counts, TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=args.episodes, steps=0)

        def show(done: int, steps: int) -> None:
            progress.update(task, completed=done, steps=progress.tasks[task].fields["steps"] + steps)

        return record(url, n_episodes=args.episodes, n_envs=args.envs, seed=args.seed, on_episode=show)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    console = Console(highlight=False)
    out = fresh(args.out)
    url = args.url or str(out)
    picture_of(out).parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    try:
        record_with_progress(console, url, args)
    except trajstore.TrajstoreError as error:
        print(f"scripts/demo: {error}", file=sys.stderr)
        return 1
    recorded = time.perf_counter()
    store = trajstore.open(url)
    n_verified = verify(store, url)
    verified = time.perf_counter()
    plot(store, picture_of(out))
    seconds = {"recorded": recorded - start, "verified": verified - recorded}
    console.print(summary(store, seconds, n_verified, url))
    console.print(next_steps(url, picture_of(out)), markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
