"""Fixtures of the tests of object stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.proxy import Proxy


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[Proxy]:
    """A network in front of the S3 server, which counts requests and fails as it is told to."""
    proxy = Proxy(s3_endpoint)
    yield proxy
    proxy.close()
