"""The schema of a store, and values checked against it.

A schema names the fields of a step, with fixed dtype and shape, and the columns of an episode. `definition` holds
`Schema` and `Field`, `nesting` turns nested mappings into paths and back, `values` checks arrays.
"""

from trajstore.schema.definition import (
    DTYPES,
    MAX_METADATA_BYTES,
    Array,
    Field,
    Schema,
    as_schema,
    check_name,
    selected_paths,
)
from trajstore.schema.nesting import check_paths, flatten, nest, observation_paths
from trajstore.schema.reserved_names import RESERVED, check_not_reserved, has_reserved
from trajstore.schema.values import (
    as_array,
    check_value,
    infer_schema,
    round_to_bfloat16,
    stored_fill,
    widen_bfloat16,
)

__all__ = [
    "DTYPES",
    "MAX_METADATA_BYTES",
    "RESERVED",
    "Array",
    "Field",
    "Schema",
    "as_array",
    "as_schema",
    "check_name",
    "check_not_reserved",
    "check_paths",
    "check_value",
    "flatten",
    "has_reserved",
    "infer_schema",
    "nest",
    "observation_paths",
    "round_to_bfloat16",
    "selected_paths",
    "stored_fill",
    "widen_bfloat16",
]
