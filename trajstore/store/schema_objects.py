"""The objects that hold a store's schema: the first one, and one for each time that fields were added.

None of them ever changes. Each holds all fields of the one before, and the newest is the schema of the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from trajstore.errors import FormatError, SchemaError
from trajstore.format.commit_record import CommitRecord
from trajstore.format.zarr_json import (
    FORMAT,
    GROUP,
    check_checksum,
    parse_json,
    trajstore_attributes,
    with_checksum,
)
from trajstore.schema import Schema
from trajstore.storage import Storage

_WAY = (
    "a field can only be added, with the value that older episodes read as: Field(..., fill=0);"
    " for other changes create another store"
)


FIRST_SCHEMAS = 2  # objects that are asked for at once: the only schema of most stores, and that it is the only one


def schema_key(number: int) -> str:
    """Key of the first schema (0), or of the schema after an addition (1, 2, ...)."""
    return f"schema/{number}/zarr.json" if number else "schema/zarr.json"


def read_schema(storage: Storage) -> Schema | None:
    """The store's schema; None if it has none yet."""
    schemas = read_schemas(storage)
    return schemas[-1] if schemas else None


def read_schemas(storage: Storage) -> list[Schema]:
    """The schemas that the store has had, oldest first.

    Raises:
        FormatError: One of them is damaged, or contradicts the one before.
    """
    # Most stores have one schema; of a remote one, learn that in a single round trip.
    numbers = range(FIRST_SCHEMAS if storage.is_remote else 1)
    return later_schemas(storage, at_once(storage, [partial(schema_object, storage, n) for n in numbers]))


def schema_object(storage: Storage, number: int) -> bytes | None:
    """The bytes of a schema object; None if it does not exist."""
    try:
        return storage.get(schema_key(number))
    except FileNotFoundError:
        return None


def later_schemas(storage: Storage, first: Sequence[bytes | None]) -> list[Schema]:
    """The schemas of a store whose first schema objects were read already."""
    schemas: list[Schema] = []
    while True:
        number = len(schemas)
        data = first[number] if number < len(first) else schema_object(storage, number)
        if data is None:
            return schemas
        what = f"{storage.display}/{schema_key(number).removesuffix('/zarr.json')}"
        schemas.append(parse_schema(data, what, schemas[-1] if schemas else None))


def at_once(storage: Storage, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of calls that read: in one round trip of a remote storage, one after the other of others."""
    return storage.map(lambda call: call(), calls) if storage.is_remote else [call() for call in calls]


def parse_schema(data: bytes, what: str, before: Schema | None = None) -> Schema:
    """Parse a schema object, which may be damaged or hostile.

    Args:
        data: The bytes of the object.
        what: What to call it in messages.
        before: The schema that it adds fields to; None if it is the first.

    Raises:
        FormatError: It is malformed, or changes more than fields that it adds.
    """
    own = trajstore_attributes(parse_json(data, what), "schema", what)
    check_checksum(data, what)
    try:
        schema = Schema.from_json(own.get("schema"))
    except SchemaError as error:
        raise FormatError(f"{what}: {error}") from error
    if before is not None:
        differences = before.differences(schema, "the one before", "this one", filled=True)
        lost = [f"it lacks '{path}' of the one before" for path in before if path not in schema.fields]
        if differences or lost:
            raise FormatError(f"{what}: the schema contradicts an earlier one: {'; '.join(differences or lost)}")
    return schema


def settle(
    storage: Storage,
    schema: Schema,
    schema_of_streams: Callable[[], Schema | None],
    first: Sequence[bytes | None] | None = None,
) -> Schema:
    """Make a schema that of the store, or add the fields that the store's schema lacks to it.

    Args:
        storage: The store.
        schema: The schema that a writer will use.
        schema_of_streams: Reads the schema that streams use; None if there is no stream.
        first: The first schema objects, if they were just read.

    Returns:
        The same fields, as the store declares them.

    Raises:
        SchemaError: It differs from the store's schema in more than fields that declare a fill.
    """
    while True:
        known = read_schemas(storage) if first is None else later_schemas(storage, first)
        first = None
        wanted = known[-1].merged(_compatible(storage, known[-1], schema)) if known else schema
        if known and len(wanted) == len(known[-1]):
            return known[-1].only(schema.fields)
        key = schema_key(len(known))
        if storage.put_once(key, schema_bytes(wanted)):
            if storage.is_exclusive:
                return wanted.only(schema.fields)
            _yield_to_streams(storage, key, known, wanted, schema_of_streams())


def _compatible(storage: Storage, stored: Schema, given: Schema) -> Schema:
    if differences := stored.differences(given, "the store", "the given schema", filled=True):
        raise SchemaError(f"{storage.display} has another schema: {'; '.join(differences)}; {_WAY}")
    return given


def _yield_to_streams(storage: Storage, key: str, known: list[Schema], wanted: Schema, used: Schema | None) -> None:
    """Put back the schema that streams use, if the schema just put contradicts it.

    Where puts are not exclusive, this process may have replaced a schema that a stream uses already. A writer
    publishes its stream, then reads the schema; a creator puts the schema, then reads the streams. So one of the
    two sees the other.
    """
    if used is None:
        return
    if not wanted.differences(used, filled=True):
        kept = wanted.merged(used)
    else:
        kept = known[-1].merged(used) if known else used
    if kept.fields.keys() != wanted.fields.keys() or kept.differences(wanted):
        storage.put(key, schema_bytes(kept))


def schema_bytes(schema: Schema) -> bytes:
    """The object that holds a schema."""
    own = {"format": FORMAT, "kind": "schema", "crc32c": "00000000", "schema": schema.to_json()}
    return with_checksum(GROUP | {"attributes": {"trajstore": own}})


def check_streams(where: str, schema: Schema, records: Iterable[CommitRecord]) -> None:
    """Refuse streams that differ from a schema in more than fields that declare a fill.

    Raises:
        SchemaError: One does; the message names it.
    """
    for record in records:
        if differences := schema.differences(record.schema, "the store", "the stream", filled=True):
            raise SchemaError(f"{where}: stream '{record.id}' has another schema: {'; '.join(differences)}")


def union_of_schemas(where: str, records: Iterable[CommitRecord]) -> Schema | None:
    """The schema with the fields of all streams; None if there are none.

    Raises:
        SchemaError: Streams contradict each other.
    """
    union: Schema | None = None
    for record in records:
        if union is None:
            union = record.schema
        check_streams(where, union, [record])
        union = union.merged(record.schema)
    return union
