"""Which ranges become one request, and which requests share a call of the client."""

from __future__ import annotations

from trajstore.storage.merged_ranges import grouped, merge

MB = 1 << 20


def test_a_request_has_at_most_eight_megabytes() -> None:
    requests, _ = merge([("key", n * MB, (n + 1) * MB) for n in range(20)])
    assert requests == [("key", 0, 8 * MB), ("key", 8 * MB, 16 * MB), ("key", 16 * MB, 20 * MB)]


def test_a_whole_object_shares_its_call_with_nothing() -> None:
    for places in ([("key", 0, None), ("key", 5, 7)], [("key", 5, 7), ("key", 0, None)]):
        assert list(grouped(places, 10)) == [slice(0, 1), slice(1, 2)]
