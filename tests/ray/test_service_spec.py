"""What a service was started with reaches the buffers of its actors."""

from __future__ import annotations

import uuid
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest

import trajstore

pytest.importorskip("ray")

from trajstore.ray.service_spec import ServiceSpec, open_partition

SCHEMA = {"x": trajstore.Field("float32", ())}


def test_actors_keep_what_they_read_in_a_disk_cache(tmp_path: Path) -> None:
    cache = trajstore.DiskCache(tmp_path / "disk", "1MB")
    url, schema = f"memory://{uuid.uuid4().hex}", trajstore.Schema(SCHEMA)
    spec = ServiceSpec.of(url, 1, schema, None, False, cache, {}, None)
    sent = ForkingPickler.loads(bytes(ForkingPickler.dumps(spec)))
    with open_partition(sent, 0, is_restart=False) as buffer:
        assert "disk_cache" in buffer.stats()["storage"]
