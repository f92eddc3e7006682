"""Figures of buffers, readers and mixtures as flat dicts of numbers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trajstore
from trajstore import Mixture, Reader, ReplayBuffer, Retention, SamplesPerInsert, Windows
from trajstore.logging import flatten

PAGE = Path(__file__).parents[2] / "docs" / "loggers.md"


def documented() -> list[re.Pattern[str]]:
    """The names in the table of the page, with their placeholders as patterns."""
    first_cells = re.findall(r"^\| (`.*?`) \|", PAGE.read_text("utf-8"), re.M)
    names = re.findall(r"`([^`]+)`", ", ".join(first_cells))
    return [re.compile(re.sub(r"<\w+>", r"\\w+", name)) for name in names]


def episode() -> dict[str, Any]:
    return {"observation": np.zeros((20, 3), np.float32), "reward": np.ones(20)}


def small_buffer(url: str, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(url, cache_bytes="16MB", buffer_bytes="16MB", seed=0, **options)
    buffer.add_episode(episode(), terminated=True)
    return buffer


def test_every_figure_of_a_buffer_is_a_float_with_a_documented_name(url: str) -> None:
    found: set[str] = set()
    options: dict[str, Any] = {"pack": True, "samples_per_insert": SamplesPerInsert(4.0)}
    for place, more in ((url, options), ("memory://figures", {"capacity": Retention(bytes="1MB")})):
        with small_buffer(place, **more) as buffer:
            buffer.flush()
            buffer.sample(4)
            figures = flatten(buffer.stats())
            assert all(type(number) is float for number in figures.values())
            assert figures["n_steps"] == buffer.n_steps == 20
            assert figures["n_sampled"] == 4
            assert figures["writer/steps"] == 20
            found |= set(figures)
    names = documented()
    assert sorted(name for name in found if not any(pattern.fullmatch(name) for pattern in names)) == []
    unused = [p.pattern for p in names if not any(map(p.fullmatch, found))]
    assert unused == [r"storage/disk_cache/\w+"]


def test_the_names_stay_the_same_while_a_buffer_grows_and_evicts(url: str) -> None:
    with small_buffer(url, capacity=30) as buffer:
        before = set(flatten(buffer.stats()))
        for _ in range(5):
            buffer.add_episode(episode(), truncated=True)
            buffer.flush()
        buffer.sample(8)
        assert set(flatten(buffer.stats())) == before


def test_readers_and_mixtures_have_figures_too(url: str) -> None:
    small_buffer(url).close()
    reader = Reader(trajstore.open(url), cache_bytes="16MB", seed=0)
    mixture = Mixture({"demo": (reader, 1.0)}, seed=0)
    mixture.sample(4, Windows(length=2))
    assert flatten(reader.stats())["n_episodes"] == 1
    assert flatten(mixture.stats(), prefix="mix")["mix/counts/demo"] == 4


def test_ranks_get_names_of_their_own() -> None:
    assert flatten([{"rank": 3, "n": 1}, {"n": 2}], prefix="p") == {
        "p/rank3/rank": 3,
        "p/rank3/n": 1,
        "p/rank1/n": 2,
    }


def test_numpy_scalars_are_numbers_and_text_none_and_marks_are_left_out() -> None:
    stats = {
        "a": np.float32(0.5),
        "b": np.array(2),
        "c": "text",
        "d": None,
        "e": {},
        "storage": {"marks": {"s": 1}},
    }
    assert flatten(stats) == {"a": 0.5, "b": 2.0}


@pytest.mark.parametrize("value", [[1.0], np.zeros(2), object()])
def test_what_is_no_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=r"figure 'a/b': expected a number, .* got"):
        flatten({"a": {"b": value}})


def test_flattening_imports_neither_torch_nor_tensorboard() -> None:
    code = (
        "import sys, trajstore; trajstore.logging.flatten({}); assert not {'torch', 'tensorboard'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
