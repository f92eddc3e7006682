"""Other programs: xarray opens the steps and spans of a stream, with named axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray
import zarr

import trajstore
from trajstore import Field, Schema


def episode(n: int = 5) -> dict[str, Any]:
    return {
        "observation": {"pixels": np.zeros((n + 1, 4, 4, 3), np.uint8), "state": np.ones((n + 1, 3), np.float32)},
        "action": np.arange(n),
        "pair": np.ones((n, 2), np.float32),
        "reward": np.arange(n, dtype=np.float64),
    }


@pytest.fixture
def stream(tmp_path: Path) -> str:
    store = trajstore.create(tmp_path / "store")
    with store.writer() as writer:
        for _ in range(3):
            writer.append_episode(episode(), terminated=True, metadata={"task": "reach"})
        writer.commit()
        writer.put_column("advantage", writer.stream, np.ones((18, 2), np.float32))
    return str(tmp_path / "store" / "streams" / writer.stream)


def test_xarray_opens_the_steps_of_a_stream(stream: str) -> None:
    steps = xarray.open_zarr(stream, group="steps")
    assert {name: array.dims for name, array in steps.items()} == {
        "action": ("step",), "pair": ("step", "pair:0"), "reward": ("step",),
    }  # fmt: skip
    assert steps.sizes == {"step": 18, "pair:0": 2}
    assert steps["action"].dtype == np.int64  # zeros are values, not missing ones
    assert steps["reward"][:6].values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 0.0]
    assert float(steps["reward"].isel(step=slice(0, 5)).mean("step")) == 2.0


def test_xarray_opens_nested_fields_spans_and_columns(stream: str) -> None:
    nested = xarray.open_zarr(stream, group="steps/observation")
    pixels = ("step", "observation.pixels:0", "observation.pixels:1", "observation.pixels:2")
    assert (nested["pixels"].dims, nested["state"].dims) == (pixels, ("step", "observation.state:0"))
    spans = xarray.open_zarr(stream, group="spans")
    assert {name: array.dims for name, array in spans.items()} == {
        "ints": ("span", "ints:0"), "floats": ("span", "floats:0"), "text": ("byte",),
    }  # fmt: skip
    tree = xarray.open_datatree(stream, engine="zarr")
    assert tree["steps/observation/state"].shape == (18, 3)
    assert tree[f"columns/{Path(stream).name}/advantage/1/values"].dims == ("row", "value:0")


def test_xarray_sees_the_committed_rows_of_a_stream_that_is_being_written(tmp_path: Path) -> None:
    with trajstore.create(tmp_path / "store").writer(commit_seconds=None) as writer:
        writer.append_episode(episode(), terminated=True)
        writer.commit()
        steps = xarray.open_zarr(tmp_path / "store" / "streams" / writer.stream, group="steps")
        assert steps.sizes["step"] == 6


@pytest.mark.parametrize("field", [Field("int64"), Field("float32", (3,))], ids=["scalar", "vector"])
def test_fields_named_like_the_axes_do_no_harm(tmp_path: Path, field: Field) -> None:
    schema = Schema({"step": field, "span": Field("int64"), "row": Field("int64", (2,)), "step_0": Field("int64")})
    with trajstore.create(tmp_path / "store", schema).writer() as writer:
        data = {path: np.ones((4, *spec.shape), spec.dtype) for path, spec in schema.fields.items()}
        writer.append_episode(data, terminated=True)
    steps = xarray.open_zarr(tmp_path / "store" / "streams" / writer.stream, group="steps")
    assert steps.sizes["step:row"] == 4
    assert not steps.coords
    assert (steps["step"] == 1).all()


def test_every_array_of_a_stream_names_its_axes(stream: str) -> None:
    group = zarr.open_group(stream, mode="r")
    arrays = [array for _, array in group.members(max_depth=None) if isinstance(array, zarr.Array)]
    assert len(arrays) > 10
    for array in arrays:
        assert array.metadata.dimension_names is not None
        assert len(array.metadata.dimension_names) == array.ndim


@pytest.mark.parametrize("names", [["step", "x"], "step", [3], {"a": 1}])
def test_names_that_do_not_fit_the_axes_are_refused(names: Any) -> None:
    from trajstore.format.array_layout import ArrayLayout

    data = ArrayLayout.of(Field("int64")).metadata(5) | {"dimension_names": names}
    with pytest.raises(trajstore.FormatError, match="dimension names"):
        ArrayLayout.from_metadata(data, "steps/x")


def test_xarray_opens_a_whole_store(stream: str) -> None:
    store = Path(stream).parent.parent
    tree = xarray.open_datatree(store, engine="zarr", consolidated=False)
    assert f"/streams/{Path(stream).name}/steps" in tree.groups
