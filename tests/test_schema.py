"""Schemas, and what values they accept."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trajstore
from trajstore import DataError, Field, Schema, SchemaError, Writer
from trajstore.schema import check_value, flatten, infer_schema, nest, round_to_bfloat16, widen_bfloat16
from trajstore.testing import strategies as ours

X = Field("float32")


@pytest.fixture
def writer() -> Iterator[Writer]:
    """A writer of a store that has no schema yet."""
    found = trajstore.create(f"memory://schema-{uuid.uuid4().hex}").writer(commit_seconds=None)
    yield found
    found.discard()


# ---- names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/a", ".hidden", "-x", "a b", "ä", "a\n", "a\0", "a\\b", "x" * 65, 3, None],
)
def test_names_that_could_leave_the_store_or_be_mangled_are_refused(name: Any) -> None:
    with pytest.raises(SchemaError, match="expected 1 to 64 of the characters"):
        Schema({name: X})


@pytest.mark.parametrize(
    "name", ["zarr.json", "__x", "__", "x.", "con", "CON", "nul", "aux.txt", "com1", "Lpt9", "prn"]
)
def test_names_that_zarr_or_a_file_system_reserves_are_refused(name: str) -> None:
    with pytest.raises(SchemaError, match="is reserved by Zarr or by a file system; choose another"):
        Schema({name: X})


@pytest.mark.parametrize("name", ["a", "_a", "A.b-c_9", "x" * 64, "console", "com10", "c", "zarr", "0"])
def test_plain_names_are_taken(name: str) -> None:
    assert list(Schema({name: X})) == [name]


def test_names_are_checked_at_every_depth() -> None:
    with pytest.raises(SchemaError, match=r"field name in 'a/b/' '\.\.'"):
        Schema({"a": {"b": {"..": X}}})


def test_names_that_differ_only_in_case_are_refused() -> None:
    with pytest.raises(SchemaError, match="fields 'g/pos' and 'g/Pos' differ only in case"):
        Schema({"g": {"pos": X, "Pos": X}})


def test_a_field_and_a_group_that_differ_only_in_case_are_refused() -> None:
    with pytest.raises(SchemaError, match="differ only in case"):
        Schema({"obs": X, "OBS": {"x": X}})


@pytest.mark.parametrize("name", ["stream", "length", "end", "return", "time", "metadata", "is_headless"])
def test_episode_columns_of_the_table_itself_are_taken(name: str) -> None:
    with pytest.raises(SchemaError, match=f"episode column '{name}' is taken by the episode table"):
        Schema({"x": X}, episode={name: int})


def test_episode_columns_have_one_of_four_types() -> None:
    with pytest.raises(
        SchemaError, match="episode column 'a': expected bool, int, float or str, got <class 'list'>"
    ):
        Schema({"x": X}, episode={"a": list})


# ---- fields --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["complex64", "object", "U3", "datetime64[ns]", "float128", ""])
def test_dtypes_that_can_not_be_stored_are_refused(dtype: str) -> None:
    with pytest.raises(SchemaError, match=f"dtype '{dtype.replace('[', chr(92) + '[')}' can't be stored; expected"):
        Field(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.dtype("float32"), torch.float32, "float32"])
def test_a_dtype_may_be_given_in_any_of_the_usual_ways(dtype: Any) -> None:
    assert Field(dtype).dtype == "float32"


@pytest.mark.parametrize("shape", [(0,), (-1,), (2.0,), (True,), ("3",), (4, 0)])
def test_shapes_are_of_positive_integers(shape: Any) -> None:
    with pytest.raises(SchemaError, match=r"^shape .*: expected at most 32 positive integers$"):
        Field("uint8", shape)


def test_a_row_has_at_most_a_gibibyte() -> None:
    with pytest.raises(SchemaError, match=r"one step of shape .* takes 8589934592 bytes; at most 1073741824"):
        Field("float64", (1 << 30,))


@pytest.mark.parametrize("chunk_rows", [0, -1, (1 << 24) + 1, 2.5, "8", True])
def test_chunk_rows_is_a_positive_integer_within_bounds(chunk_rows: Any) -> None:
    with pytest.raises(SchemaError, match="chunk_rows"):
        Field("uint8", chunk_rows=chunk_rows)


@pytest.mark.parametrize("codec", ["gzip", "zstd:99", "zstd:x", "none:1", "blosc-lz4:10", 3])
def test_a_codec_that_does_not_exist_is_refused_before_a_store_is_made_with_it(codec: Any) -> None:
    with pytest.raises(SchemaError, match="codec"):
        trajstore.create(f"memory://codec-{uuid.uuid4().hex}", Schema({"x": Field("float32", codec=codec)}))


def test_a_chunk_too_large_is_refused_before_a_store_is_made_with_it() -> None:
    schema = Schema({"x": Field("float64", (1 << 20,), chunk_rows=1 << 20)})
    with pytest.raises(SchemaError, match="lower chunk_rows"):
        trajstore.create(f"memory://chunk-{uuid.uuid4().hex}", schema)


@pytest.mark.parametrize("fields", [{}, {"a": {}}, None, {"a": 3}])
def test_a_schema_has_fields(fields: Any) -> None:
    with pytest.raises(SchemaError, match=r"expected a (Field or a )?non-empty mapping of Fields, got"):
        Schema(fields)


def test_a_shape_that_is_no_tuple_is_refused() -> None:
    with pytest.raises(SchemaError, match="shape 3: expected a tuple of integers"):
        Field("float32", 3)  # type: ignore[arg-type]


def test_fields_are_nested_at_most_16_deep() -> None:
    nested: Any = X
    for _ in range(40):
        nested = {"a": nested}
    with pytest.raises(SchemaError, match="nested deeper than 16 levels"):
        Schema(nested)


def test_reward_alignment_is_one_of_two() -> None:
    with pytest.raises(SchemaError, match="reward_alignment 'next': expected 'action' or 'observation'"):
        Schema({"x": X}, reward_alignment="next")  # type: ignore[arg-type]


# ---- values --------------------------------------------------------------------------------------------


def refused(spec: Field, value: Any, lead: tuple[int, ...] = ()) -> str:
    with pytest.raises(DataError) as caught:
        check_value("f", spec, value, lead)
    return str(caught.value)


def test_a_wrong_dtype_and_shape_are_named() -> None:
    spec = Field("uint8", (84, 84))
    assert refused(spec, np.zeros((200, 84, 84), np.float32), (200,)) == (
        "field 'f': expected uint8 of shape (200, 84, 84), got float32 of shape (200, 84, 84)"
    )
    assert refused(spec, np.zeros((84,), np.uint8)) == (
        "field 'f': expected uint8 of shape (84, 84), got uint8 of shape (84)"
    )


def test_byte_swapped_arrays_are_refused_by_name() -> None:
    assert refused(Field("int32", (2,)), np.zeros(2, ">i4")) == (
        "field 'f': expected int32 of shape (2), got byte-swapped int32 of shape (2)"
    )


@pytest.mark.parametrize("value", ["text", None, object(), 1j, np.array("2020", "M8[s]"), b"x"])
def test_values_of_other_kinds_are_refused(value: Any) -> None:
    assert refused(X, value).startswith("field 'f': dtype ")


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("bool", True), ("uint8", 0), ("uint8", 255), ("int8", -128), ("int64", -(1 << 63)),
        ("uint64", (1 << 64) - 1), ("float16", 65504.0), ("float32", 3), ("float64", 1e308),
        ("float32", float("inf")),
    ],
)  # fmt: skip
def test_python_numbers_in_range_are_taken(dtype: str, value: Any) -> None:
    array = check_value("f", Field(dtype), value, ())
    assert array.dtype == dtype
    assert array.item() == value


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("uint8", 256), ("uint8", -1), ("int8", 128), ("int64", 1 << 63), ("uint64", 1 << 64), ("uint64", -1),
        ("float16", 65520.0), ("float32", 1e39), ("float32", -1e39), ("float64", 10**400), ("bfloat16", 1e39),
        ("bfloat16", 3.4e38),
    ],
)  # fmt: skip
def test_python_numbers_out_of_range_are_refused(dtype: str, value: Any) -> None:
    assert refused(Field(dtype), value) == f"field 'f': {value!r} is out of range for {dtype}"


@pytest.mark.parametrize(
    ("dtype", "value"), [("bool", 1), ("bool", 1.0), ("int64", 1.0), ("int64", True), ("float32", True)]
)
def test_python_numbers_of_another_kind_are_refused(dtype: str, value: Any) -> None:
    assert refused(Field(dtype), value) == (
        f"field 'f': expected {dtype} of shape (), got {type(value).__name__} of shape ()"
    )


def test_a_python_number_does_not_fill_an_array() -> None:
    assert refused(Field("float32", (2,)), 1.0) == "field 'f': expected float32 of shape (2), got float of shape ()"


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 1 / 3, 1e-40, 3.3e38, float("inf"), float("nan")])
def test_python_floats_become_the_nearest_bfloat16(value: float) -> None:
    bits = check_value("f", Field("bfloat16"), value, ())
    expected = torch.tensor(value, dtype=torch.float32).to(torch.bfloat16)
    assert bits.dtype == np.uint16
    assert torch.equal(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), expected) or value != value
    assert np.isnan(widen_bfloat16(bits)) == np.isnan(value)


@given(st.lists(st.floats(width=32), min_size=1))
@settings(deadline=None)
def test_rounding_to_bfloat16_is_that_of_ml_dtypes(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    ours_bits, theirs = round_to_bfloat16(values), values.astype(ml_dtypes.bfloat16).view(np.uint16)
    same = (ours_bits == theirs) | np.isnan(values)
    assert same.all()
    assert np.isnan(widen_bfloat16(ours_bits)[np.isnan(values)]).all()


def test_tensors_are_taken_and_their_dtype_is_checked() -> None:
    assert check_value("f", Field("float32", (2,)), torch.ones(2, requires_grad=True), ()).tolist() == [1, 1]
    assert refused(X, torch.tensor(1, dtype=torch.float64)) == (
        "field 'f': expected float32 of shape (), got float64 of shape ()"
    )
    assert refused(X, torch.tensor(1, dtype=torch.complex64)) == (
        "field 'f': dtype complex64 can't be stored (from Tensor); expected numbers or bools"
    )


def test_missing_and_unexpected_fields_are_named(writer: Writer) -> None:
    writer.append({"a": 1, "b": 2})
    with pytest.raises(DataError, match="fields: missing 'b'; unexpected 'c'; the schema has 'a', 'b'"):
        writer.append({"a": 1, "c": 2})


# ---- a schema read off the data ------------------------------------------------------------------------


def test_one_row_more_shows_which_fields_have_a_final_value(writer: Writer) -> None:
    writer.append_episode({"o": {"x": np.zeros((6, 2), np.float32)}, "a": np.zeros(5, np.int32)}, terminated=True)
    assert writer.schema == Schema({"o": {"x": Field("float32", (2,), final=True)}, "a": Field("int32")})


def test_equal_lengths_show_no_final_value(writer: Writer) -> None:
    writer.append_episode({"o": np.zeros((5, 2)), "a": np.zeros(5, bool)}, terminated=True)
    assert writer.schema == Schema({"o": Field("float64", (2,)), "a": Field("bool")})


def test_python_numbers_become_the_widest_of_their_kind(writer: Writer) -> None:
    writer.append({"a": 1, "b": 0.5, "c": True, "d": np.float32(1), "e": [1, 2]})
    assert {path: spec.dtype for path, spec in writer.schema.fields.items()} == {
        "a": "int64", "b": "float64", "c": "bool", "d": "float32", "e": "int64",
    }  # fmt: skip
    assert writer.schema["e"].shape == (2,)


def test_a_final_argument_shows_which_fields_have_one(writer: Writer) -> None:
    writer.append({"o": 1.0, "a": 1})
    writer.append({"o": 1.0, "a": 1}, terminated=True, final={"o": 2.0})
    assert writer.schema.final_fields == ("o",)


def test_leading_axes_are_not_part_of_the_shape(writer: Writer) -> None:
    writer.append_rollout({"o": np.zeros((7, 3, 2)), "a": np.zeros((7, 3), np.int8)})
    assert writer.schema == Schema({"o": Field("float64", (2,)), "a": Field("int8")})


def test_refused_data_leaves_no_schema(writer: Writer) -> None:
    with pytest.raises(DataError, match="expected the same number of rows in every field"):
        writer.append_episode({"o": np.zeros(9), "a": np.zeros(5)}, terminated=True)
    assert writer.schema is None
    writer.append({"other": 1})
    assert list(writer.schema) == ["other"]


def test_data_that_disagrees_with_the_first_is_refused(writer: Writer) -> None:
    writer.append({"a": np.float32(1)})
    with pytest.raises(DataError, match=r"field 'a': expected float32 of shape \(\), got float64 of shape \(2\)"):
        writer.append({"a": np.zeros(2)})


@pytest.mark.parametrize(("data", "n_lead"), [({}, 0), ({"a": np.zeros(3)}, 2)])
def test_there_must_be_something_to_read_a_schema_off(data: dict[str, Any], n_lead: int) -> None:
    with pytest.raises(DataError, match=r"expected at least one field, got none|leading axes"):
        infer_schema(data, n_lead)


# ---- comparing and storing -----------------------------------------------------------------------------


@given(ours.schemas())
@settings(deadline=None)
def test_a_schema_survives_json(schema: Schema) -> None:
    back = Schema.from_json(json.loads(json.dumps(schema.to_json())))
    assert back == schema
    assert back.to_json() == schema.to_json()
    assert list(back) == list(schema)


@given(st.dictionaries(st.sampled_from(["a", "b/c", "b/d", "e/f/g"]), st.integers(), min_size=1))
def test_nesting_and_flattening_undo_each_other(flat: dict[str, int]) -> None:
    assert flatten(nest(flat)) == flat


def test_equal_schemas_have_no_differences() -> None:
    a = Schema({"x": Field("float32", (2,), chunk_rows=4, codec="none")})
    assert a.differences(Schema({"x": Field("float32", (2,))})) == []
    assert a == Schema({"x": Field("float32", (2,))})


def test_differences_name_every_field_that_differs() -> None:
    a = Schema({"same": X, "x": X, "mine": X}, episode={"e": int})
    b = Schema({"same": X, "x": Field("float32", final=True), "theirs": X}, reward_alignment="observation")
    found = a.differences(b)
    assert [line.partition(":")[0] for line in found] == ["x", "mine", "theirs", "episode", "reward_alignment"]
    assert found[1] == "mine: float32 () in the first, absent in the second"
    assert found[2] == "theirs: absent in the first, float32 () in the second"


def stored(**fields: Any) -> dict[str, Any]:
    return {"fields": fields, "episode": {}, "reward": None, "reward_alignment": "action"}


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"fields": {}},
        stored(),
        stored(a={}),
        stored(a=3),
        stored(**{"a": X.to_json(), "a/b": X.to_json()}),
        stored(**{"a/b": X.to_json(), "a": X.to_json()}),
        stored(a=X.to_json() | {"shape": "33"}),
        stored(a=X.to_json() | {"shape": [1] * 40}),
        stored(a=X.to_json() | {"final": 1}),
        stored(**{"../a": X.to_json()}),
        stored(a=X.to_json()) | {"episode": {"seed": "complex"}},
        stored(a=X.to_json()) | {"reward_alignment": []},
    ],
)
def test_a_stored_schema_is_not_trusted(data: Any) -> None:
    assert Schema.from_json(stored(a=X.to_json())) == Schema({"a": X})
    with pytest.raises(SchemaError):
        Schema.from_json(data)
