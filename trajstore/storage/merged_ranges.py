"""Ranges of one object that lie close together become one request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trajstore.storage.interface import Data, Place

_MAX_GAP_BYTES = 32 << 10  # read and thrown away: less than a request costs
_MAX_BYTES = 8 << 20  # larger requests gain nothing, and are repeated whole when they fail


def merge(places: Sequence[Place]) -> tuple[list[Place], Callable[[Sequence[Data]], list[Data]]]:
    """The requests for these places, and a function that cuts their answers into what was asked for."""
    requests: list[Place] = []
    pieces: list[tuple[int, int, int | None]] = [(0, 0, None)] * len(places)  # request, and a range of its answer
    order = sorted(range(len(places)), key=lambda i: (places[i][0], places[i][2] is None, places[i][1]))
    for i in order:
        key, start, stop = places[i]
        if not (stop is not None and requests and _extend(requests, key, start, stop)):
            requests.append(places[i])
        first = requests[-1][1]
        pieces[i] = (len(requests) - 1, start - first, None if stop is None else stop - first)

    def cut(answers: Sequence[Data]) -> list[Data]:
        return [answers[r] if _is_whole(requests[r], a, b) else memoryview(answers[r])[a:b] for r, a, b in pieces]

    return requests, cut


def grouped(places: Sequence[Place], most: int) -> Iterator[slice]:
    """Divide places that are sorted by key into ranges of one object, at most so many; a whole object is alone."""
    start = 0
    for i, (key, _, stop) in enumerate(places):
        is_alone = stop is None or places[start][2] is None
        if i > start and (is_alone or i - start == most or key != places[start][0]):
            yield slice(start, i)
            start = i
    if places:
        yield slice(start, len(places))


def _extend(requests: list[Place], key: str, start: int, stop: int) -> bool:
    last_key, first, end = requests[-1]
    if key != last_key or end is None or start > end + _MAX_GAP_BYTES or max(stop, end) - first > _MAX_BYTES:
        return False
    requests[-1] = (key, first, max(stop, end))
    return True


def _is_whole(request: Place, start: int, stop: int | None) -> bool:
    return stop is None or (start == 0 and request[2] is not None and stop == request[2] - request[1])
