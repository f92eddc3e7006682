"""The batches of fixed seeds, pinned: a change that alters a batch fails here, whatever it moves or renames.

Only the public API is used. ``tests/sampling/digests/batches.json`` has a digest of every case. If a batch is meant
to change, write it again from the root of the repository, look at the difference, and commit it::

    python -m tests.sampling.test_digests --write
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tests.sampling.digests import live, others, reading, several
from tests.sampling.digests.digest import Digest, differences, digest
from tests.sampling.digests.stores import Case, Places

CASES: dict[str, Case] = {**reading.CASES, **live.CASES, **several.CASES, **others.CASES}
FIXTURE = Path(__file__).parent / "digests" / "batches.json"
REGENERATE = "if that is meant, run: python -m tests.sampling.test_digests --write"


def _fixture() -> dict[str, Digest]:
    found: dict[str, Digest] = json.loads(FIXTURE.read_text())
    return found


EXPECTED = _fixture() if FIXTURE.exists() else {}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places(tmp_path_factory.mktemp("digests"))


@pytest.mark.parametrize("name", CASES)
def test_the_batches_of_a_seed_are_what_they_were(name: str, places: Places) -> None:
    for way, batches in CASES[name](places):
        lines = differences(digest(batches), EXPECTED[name])
        if lines:
            pytest.fail(
                f"'{name}' ({way}) gives other batches; {REGENERATE}\n  " + "\n  ".join(lines), pytrace=False
            )


def test_the_fixture_has_every_case_and_no_other() -> None:
    assert sorted(EXPECTED) == sorted(CASES), REGENERATE


def test_a_digest_notices_a_bit_a_dtype_a_shape_and_an_order() -> None:
    value = torch.arange(6)
    before = digest([{"x": value}])
    others = [value + torch.tensor([0, 0, 0, 0, 0, 1]), value.int(), value.reshape(2, 3), value.flip(0)]
    for other in others:
        assert [line.split(":")[0] for line in differences(digest([{"x": other}]), before)] == ["x"]
    assert not differences(digest([{"x": value.clone()}]), before)
    assert differences(digest([{"x": value}, {"x": value}]), before)


def test_computed_numbers_may_be_rounded_differently_but_not_more() -> None:
    value = torch.rand(100, dtype=torch.float64) + 0.5
    before = digest([{"priority": {"weight": value}}])
    assert not differences(digest([{"priority": {"weight": value * (1 + 1e-7)}}]), before)
    for other in (value * (1 + 1e-4), value.flip(0), value[:-1]):
        assert differences(digest([{"priority": {"weight": other}}]), before)


def _digest_of(name: str, places: Places) -> Digest:
    runs = [(way, digest(batches)) for way, batches in CASES[name](places)]
    for way, found in runs[1:]:
        if lines := differences(found, runs[0][1]):
            raise AssertionError(f"'{name}': {way} differs from {runs[0][0]}:\n  " + "\n  ".join(lines))
    return runs[0][1]


def write() -> None:
    """Write the fixture; refused where the ways of a case do not agree."""
    with tempfile.TemporaryDirectory() as root:
        found = {name: _digest_of(name, Places(Path(root))) for name in sorted(CASES)}
    FIXTURE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
