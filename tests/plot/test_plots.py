"""Plots of real stores and buffers: what is drawn is what is stored, and nothing global changes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

import trajstore
from trajstore import DataError, Field, MissingExtraError, Priorities, ReplayBuffer, Schema, Store, Windows, plot

N_EPISODES = 40


def draw(axes: Axes) -> Axes:
    """Draw the whole figure, so that bad labels and formats raise."""
    axes.figure.draw_without_rendering()
    return axes


def texts(axes: Axes) -> str:
    return " | ".join([axes.get_title(loc="left"), *(text.get_text() for text in axes.texts)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, list[Any]]:
    """A run with priorities, policy versions and frames, and the batches that it drew."""
    rng = np.random.default_rng(0)
    url = tmp_path_factory.mktemp("plots") / "run"
    drawn = []
    with ReplayBuffer(url, priorities=Priorities(), sample=Windows(1), seed=0) as buffer:
        for i in range(N_EPISODES):
            buffer.policy_version = i // 10
            n = 5 + i % 7
            data = {
                "observation": {"pixels": rng.integers(0, 255, (n + 1, 12, 16, 3), np.uint8),
                                "state": rng.normal(size=(n + 1, 3)).astype(np.float32)},
                "action": rng.integers(0, 3, n),
                "reward": np.full(n, i / 10, np.float32),
            }  # fmt: skip
            buffer.add_episode(data, terminated=i % 2 == 0, truncated=i % 2 == 1, metadata={"i": i})
            if i == N_EPISODES // 2:
                buffer.flush()
            if i >= 10:
                batch = buffer.sample(8)
                drawn.append(batch["index"])
                buffer.update_priorities(batch["index"], rng.gamma(0.5, 1.0, 8))
    return trajstore.open(url), drawn


ALL = {
    "returns": lambda store, drawn, **ax: plot.returns(store, **ax),
    "returns by version": lambda store, drawn, **ax: plot.returns(store, over="policy_version", **ax),
    "lengths over time": lambda store, drawn, **ax: plot.lengths(store.history(), over="time", **ax),
    "column": lambda store, drawn, **ax: plot.column(store.episodes, "priority.mean", over="episodes", **ax),
    "priorities": lambda store, drawn, **ax: plot.priorities(store, **ax),
    "effective sample size": lambda store, drawn, **ax: plot.effective_sample_size(store, **ax),
    "coverage": lambda store, drawn, **ax: plot.coverage(store, drawn, **ax),
    "ages": lambda store, drawn, **ax: plot.ages(store.snapshot, **ax),
    "ages of draws": lambda store, drawn, **ax: plot.ages(store, drawn, by="policy_version", **ax),
    "rewards": lambda store, drawn, **ax: plot.rewards(store, **ax),
    "actions": lambda store, drawn, **ax: plot.actions(store, **ax),
    "vector": lambda store, drawn, **ax: plot.distribution(store, "observation/state", **ax),
    "pixels": lambda store, drawn, **ax: plot.distribution(store, "observation/pixels", **ax),
    "frames": lambda store, drawn, **ax: plot.frames(store, 3, n=4, **ax),
    "storage": lambda store, drawn, **ax: plot.storage(store, **ax),
}


@pytest.mark.parametrize("name", ALL)
def test_a_plot_draws_on_the_given_axes_and_changes_nothing_global(name: str, run: tuple[Store, list[Any]]) -> None:
    before = dict(mpl.rcParams)
    axes = Figure().subplots()
    assert ALL[name](*run, ax=axes) is axes
    assert axes.has_data()
    draw(axes)
    assert dict(mpl.rcParams) == before
    assert len(axes.figure.axes) <= 2  # the plot, and the bar of its colours


def test_new_axes_are_shown_by_notebooks_without_pyplot(run: tuple[Store, list[Any]]) -> None:
    assert plot.returns(run[0])._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    code = (
        "import sys, trajstore; trajstore.plot.returns; assert 'matplotlib' not in sys.modules;"
        f"trajstore.plot.returns(trajstore.open({run[0].url!r})); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_without_matplotlib_the_error_names_the_extra(
    run: tuple[Store, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = Figure().subplots()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'trajstore\[plot\]'"):
        plot.returns(run[0], ax=axes)


def test_the_points_are_the_returns_at_the_steps_collected(run: tuple[Store, list[Any]]) -> None:
    table = run[0].episodes
    axes = plot.returns(run[0])
    points = np.concatenate([np.asarray(part.get_offsets()) for part in axes.collections])
    points = points[np.argsort(points[:, 0])]
    assert points[:, 0].tolist() == np.cumsum(table["length"]).tolist()
    assert points[:, 1] == pytest.approx(table["return"])


def test_the_median_is_taken_over_the_window_and_by_policy_version(run: tuple[Store, list[Any]]) -> None:
    returns = run[0].episodes["return"]
    (line,) = plot.returns(run[0], window=5).lines
    assert np.asarray(line.get_ydata())[20] == pytest.approx(np.median(returns[18:23]))
    (by_version,) = plot.returns(run[0], over="policy_version").lines
    assert np.asarray(by_version.get_xdata()).tolist() == [0, 1, 2, 3]
    medians = [np.median(part) for part in np.split(returns, 4)]
    assert np.asarray(by_version.get_ydata()) == pytest.approx(medians)


def test_open_episodes_are_points_but_do_not_lower_the_median(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "run") as buffer:
        for _ in range(10):
            buffer.add_episode({"observation": np.zeros((5, 1)), "reward": np.ones(4)}, terminated=True)
        buffer.append({"observation": np.zeros((6, 1)), "reward": np.ones(6)}, envs=6)
        buffer.flush()
        axes = draw(plot.returns(buffer, window=5))
        assert sum(len(points.get_offsets()) for points in axes.collections) == 16
        (median,) = axes.get_lines()
        assert np.asarray(median.get_ydata()).tolist() == [4.0] * 10
        by_length = draw(plot.returns(buffer, over="length"))
        assert np.asarray(by_length.get_lines()[0].get_xdata()).tolist() == [4.0]


def test_open_episodes_alone_are_points_without_a_median(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "run") as buffer:
        buffer.append({"observation": np.zeros((6, 1)), "reward": np.ones(6)}, envs=6)
        buffer.flush()
        axes = draw(plot.returns(buffer))
        assert len(axes.collections) == 1
        assert not axes.get_lines()


def test_frames_of_an_episode_without_rewards_have_a_title_without_a_return(tmp_path: Path) -> None:
    store = trajstore.create(tmp_path / "run")
    with store.writer() as writer:
        writer.append_episode({"frame": np.zeros((3, 8, 8), np.uint8)}, truncated=True)
    store.refresh()
    assert texts(draw(plot.frames(store))).startswith("frame, episode 0 (3 steps, truncated)")


def test_coverage_counts_draws_and_says_what_is_not_stored(run: tuple[Store, list[Any]]) -> None:
    store, drawn = run
    n_steps = int(store.episodes["length"].sum())
    axes = plot.coverage(store, drawn, n_bins=10)
    heights = [bar.get_height() for bar in axes.patches]  # type: ignore[attr-defined]
    assert sum(heights) * n_steps / 10 == pytest.approx(8 * len(drawn))
    everything = np.concatenate([np.asarray(index) for index in drawn])
    n_distinct = len(np.unique(everything, axis=0))
    assert f"{100 * n_distinct / n_steps:.1f} % of {n_steps} steps" in texts(axes)
    part = store.episodes.take(np.arange(N_EPISODES)[::-2])
    in_part = np.isin(everything[:, 1], part["episode"])
    heights = [bar.get_height() for bar in plot.coverage(part, drawn, n_bins=5).patches]  # type: ignore[attr-defined]
    assert sum(heights) * part["length"].sum() / 5 == pytest.approx(in_part.sum())
    strange = np.array([[0, 10_000, 0], [7, 0, 0], [0, 0, 99]])
    assert "3 draws of steps that are evicted" in texts(plot.coverage(store, [strange]))
    with pytest.raises(DataError, match=r"shape \(batch, 3\)"):
        plot.coverage(store, [np.zeros((2, 2))])


def test_a_buffer_is_drawn_while_it_runs(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "run", priorities=Priorities(alpha=1.0), sample=Windows(1)) as buffer:
        assert "no episodes" in texts(draw(plot.returns(buffer)))
        index = buffer.add_episode({"action": np.arange(4), "reward": np.ones(4)}, terminated=True)
        assert index is not None
        batch = buffer.sample(16)
        buffer.update_priorities(batch["index"], np.full(16, 2.0))
        buffer.flush()
        assert "Return of 1 episodes" in texts(draw(plot.returns(buffer)))
        assert "Priorities of 4 steps" in texts(draw(plot.priorities(buffer)))
        assert "Effective sample size" in texts(draw(plot.effective_sample_size(buffer)))
        assert "of 4 steps were drawn" in texts(draw(plot.coverage(buffer, batch)))
        draw(plot.ages(buffer.reader, [batch]))
    assert "Return of 1 episodes" in texts(draw(plot.returns(buffer)))  # a closed one too


def test_the_effective_sample_size_is_that_of_the_priorities(run: tuple[Store, list[Any]]) -> None:
    values = np.concatenate(
        [run[0].read_episode(i, columns=["priority"])["priority"] for i in range(N_EPISODES)]
    ).astype(np.float64)
    mass = (values + 1e-6) ** 0.5
    size = mass.sum() ** 2 / (mass**2).sum()
    assert f"{size:,.0f} of {len(values)} steps" in texts(plot.effective_sample_size(run[0], alpha=0.5, eps=1e-6))


def test_what_a_store_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    store = trajstore.create(tmp_path / "s")
    with store.writer() as writer:
        writer.append_episode({"x": np.ones((3, 2), np.float32)}, terminated=True)
    store.refresh()
    with pytest.raises(DataError, match="no policy versions are stored"):
        plot.returns(store, over="policy_version")
    with pytest.raises(DataError, match="no episode column 'nothing'"):
        plot.column(store, "nothing")
    with pytest.raises(DataError, match="expected numbers"):
        plot.column(store, "end")
    with pytest.raises(DataError, match="no derived column 'priority'"):
        plot.priorities(store)
    with pytest.raises(DataError, match="names no reward"):
        plot.rewards(store)
    with pytest.raises(DataError, match="holds actions, found none"):
        plot.actions(store)
    with pytest.raises(DataError, match="no field holds images"):
        plot.frames(store)
    with pytest.raises(KeyError, match="no field 'y'"):
        plot.distribution(store, "y")
    with pytest.raises(TypeError, match=r"trajstore\.open"):
        plot.returns("runs/7")  # type: ignore[arg-type]
    assert "no episode has a return" in texts(draw(plot.returns(store)))
    figure = plot.overview(store)
    figure.draw_without_rendering()
    assert any("names no reward" in texts(axes) for axes in figure.axes)


def test_an_empty_store_is_drawn_as_empty() -> None:
    store = trajstore.create("memory://empty")
    plot.overview(store).draw_without_rendering()
    assert "no steps" in texts(draw(plot.ages(store)))
    assert "no steps" in texts(draw(plot.coverage(store, [])))


def test_a_damaged_store_is_drawn_as_far_as_it_can_be_read(run: tuple[Store, list[Any]], tmp_path: Path) -> None:
    shutil.copytree(run[0].url, tmp_path / "store")
    for chunk in (tmp_path / "store").glob("streams/*/steps/reward/c*"):
        chunk.unlink()
    figure = plot.overview(trajstore.open(tmp_path / "store"))
    figure.draw_without_rendering()
    assert "array 'steps/reward'" in texts(figure.axes[2]).replace("\n", " ")
    assert f"{N_EPISODES} episodes" in texts(figure.axes[0])


@pytest.mark.parametrize("n", [50, 61, 1000])
def test_whole_numbers_lie_in_bins_of_equally_many(n: int, tmp_path: Path) -> None:
    store = trajstore.create(f"memory://whole-{n}")
    with store.writer() as writer:
        writer.append_episode({"action": np.arange(n), "reward": np.ones(n)}, terminated=True)
    store.refresh()
    (bars,) = [patch for patch in plot.actions(store).patches if isinstance(patch, StepPatch)]
    counts = np.round(bars.get_data().values * n)
    assert set(counts[:-1]) == {np.ceil(n / 60)}  # no gaps; the last one may hold fewer
    assert counts.sum() == n


def test_many_episodes_are_drawn_as_bins_with_few_points(tmp_path: Path) -> None:
    store = trajstore.create(tmp_path / "s", Schema({"reward": Field("float64")}))
    with store.writer() as writer:
        for i in range(4000):
            writer.append_episode({"reward": np.array([float(i)])}, terminated=True)
    store.refresh()
    axes = draw(plot.returns(store))
    (line,) = axes.lines
    assert 100 < len(np.asarray(line.get_xdata())) < 1000
    assert sum(len(np.asarray(part.get_offsets())) for part in axes.collections) <= 1  # the band alone
    assert np.asarray(line.get_ydata())[0] == pytest.approx(6.0)  # of the first 13 episodes


def test_values_that_are_not_finite_and_names_with_dollars_do_no_harm(tmp_path: Path) -> None:
    store = trajstore.create(tmp_path / "s")
    with store.writer() as writer:
        rewards = np.array([np.nan, np.inf, 1.0, 2.0])
        writer.append_episode({"action": np.zeros((4, 2)), "reward": rewards}, terminated=True)
        writer.append_episode({"action": np.full((2, 2), np.nan), "reward": np.ones(2)}, terminated=True)
    store.refresh()
    assert "2 values are NaN or infinite" in texts(draw(plot.rewards(store)))
    draw(plot.actions(store))
    draw(plot.returns(store))
    axes = plot.returns(store)
    from trajstore.plot import drawing

    drawing.finish(axes, r"$\frac{1}$ $", "$_$", "a\x1b[31mb")
    draw(axes)


def test_a_sample_of_steps_comes_from_everywhere_and_without_final_rows(tmp_path: Path) -> None:
    store = trajstore.create(tmp_path / "s", Schema({"o": Field("int64", final=True), "reward": Field("float64")}))
    with store.writer() as writer:
        for i in range(500):
            writer.append_episode({"o": np.full(11, i), "reward": np.ones(10)}, terminated=True)
    store.refresh()
    axes = draw(plot.rewards(store, max_steps=640))
    assert "640 of 5,000 steps" in texts(axes)
    (bar,) = axes.patches
    assert bar.get_height() == 1.0  # type: ignore[attr-defined]  # final rows hold 0 in other fields
