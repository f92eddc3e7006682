"""What storages promise, on a real server of each kind. S3 by moto is in test_storage.py."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.conftest import Place
from trajstore.storage import Storage, open_storage
from trajstore.testing.conformance import StorageConformance

IS_LONG = bool(os.environ.get("TRAJSTORE_ALL_SERVER_TESTS"))


class OnServer(StorageConformance):
    kind: str
    transport = "auto"

    @pytest.fixture
    def storage(self, new_place: Callable[[str], Place]) -> Storage:
        place = new_place(self.kind)
        return open_storage(place.url, {**place.options, "transport": self.transport})


class TestSeaweedFS(OnServer):
    kind = "seaweedfs"
    # Races have one winner, but the losers wait for seconds, and so do later puts.
    test_exactly_one_of_many_threads_wins_an_exclusive_put = None
    test_exactly_one_of_many_storage_objects_wins_an_exclusive_put = None

    def test_removing_a_tree_removes_all_below_the_prefix_and_nothing_beside_it(self, storage: Storage) -> None:
        """It lists an emptied folder for some time more, as S3 does not; the objects are gone at once."""
        for key in ("p/a/zarr.json", "p/a/x/y/z", "p/ab/zarr.json", "p/zarr.json"):
            storage.put(key, b"1")
        storage.remove_tree("p/a")
        assert storage.list_tree("p") == ["p/ab/zarr.json", "p/zarr.json"]
        assert storage.list_tree("p/a") == []


class TestGCS(OnServer):
    kind = "gcs"


class TestGCSByObstore(OnServer):
    """By the XML interface, as `tests.support.servers.gcs_xml` reads Google's reference of it."""

    kind = "gcs"
    transport = "obstore"
    if not IS_LONG:  # other classes have them by the same code
        test_exactly_one_of_many_storage_objects_wins_an_exclusive_put = None
        test_a_child_forked_in_the_middle_of_a_put_can_use_the_storage = None
        test_a_storage_in_use_works_in_a_child_process = None


class TestAzure(OnServer):
    kind = "azure"
