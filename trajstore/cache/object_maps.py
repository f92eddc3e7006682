"""The objects of streams that are mapped into memory."""

from __future__ import annotations

from trajstore.store.stream_reader import MappedObject, StreamReader

_MAX_MAPS = 20_000  # Linux allows a process 65,530 by default
TOUCH_S = 30.0  # between looking whether files that may be removed still have their names


class ObjectMaps:
    """Mapped objects by the folder of their stream, by field and number.

    Threads may call `get`; the other methods are called with the owner's lock held.
    """

    def __init__(self) -> None:
        self._maps: dict[tuple[str, str], dict[int, MappedObject]] = {}

    @property
    def n(self) -> int:
        """How many objects are mapped."""
        return sum(map(len, self._maps.values()))

    @property
    def is_full(self) -> bool:
        """Whether no more objects should be mapped; the owner forgets all mapped pages and calls `clear`."""
        return self.n >= _MAX_MAPS

    def get(self, reader: StreamReader, path: str, chunk: int) -> MappedObject | None:
        """Return the object that holds a chunk of a field; maps it if necessary.

        None if no file of this machine has all of the object.

        Raises:
            ChunkError: It is missing, or its index is damaged.
        """
        maps = self._maps.setdefault((reader.record.folder, path), {})
        number = reader.object_number(f"steps/{path}", chunk)
        mapped = maps.get(number)
        if mapped is None and (found := reader.map_object(f"steps/{path}", number)) is not None:
            mapped = maps.setdefault(number, found)
        return mapped

    def drop_gone(self) -> list[tuple[str, str, int]]:
        """Note that all files are used, and unmap those that lost their names.

        Returns:
            Folder, field and number of the objects that were unmapped.
        """
        gone = [
            (folder, path, number)
            for (folder, path), maps in self._maps.items()
            for number, mapped in maps.items()
            if not mapped.file.touch(2 * TOUCH_S)
        ]
        for key in gone:
            self.drop(*key)
        return gone

    def drop(self, folder: str, path: str, number: int) -> None:
        """Unmap one object."""
        self._maps.get((folder, path), {}).pop(number, None)

    def drop_below(self, folder: str, path: str, number: int) -> None:
        """Unmap the objects of a field with lower numbers."""
        for lower in [n for n in self._maps.get((folder, path), {}) if n < number]:
            self.drop(folder, path, lower)

    def drop_field(self, path: str) -> None:
        """Unmap all objects of a field."""
        for key in [key for key in self._maps if key[1] == path]:
            del self._maps[key]

    def drop_folder(self, folder: str) -> None:
        """Unmap all objects of a stream in its folder."""
        for key in [key for key in self._maps if key[0] == folder]:
            del self._maps[key]

    def clear(self) -> None:
        """Unmap all objects."""
        self._maps.clear()
