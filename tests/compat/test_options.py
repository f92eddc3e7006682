"""The keyword options of the drop-ins are those of `trajstore.ReplayBuffer`, with the same types."""

from __future__ import annotations

import importlib
import inspect
from typing import get_type_hints

import pytest

from trajstore.compat.options import ReplayOptionsDict, SamplingOptionsDict
from trajstore.replay.options import ReplayOptions

OF_DROP_INS = {"capacity", "device", "sample", "seed"}  # every drop-in has its own parameters for these
OF_STORES = {"storage_options", "fsync", "disk_cache"}


def test_the_typed_options_are_those_of_the_buffer() -> None:
    expected = get_type_hints(ReplayOptions)
    found = get_type_hints(SamplingOptionsDict)
    assert found.keys() == (expected.keys() - OF_DROP_INS) | OF_STORES
    assert {name: found[name] for name in found.keys() - OF_STORES} == {
        name: expected[name] for name in found.keys() - OF_STORES
    }


def test_the_options_of_every_drop_in_leave_out_how_batches_look() -> None:
    assert SamplingOptionsDict.__annotations__.keys() - ReplayOptionsDict.__annotations__.keys() == {
        "priorities",
        "as_tensordict",
    }


@pytest.mark.parametrize(
    ("module", "face"),
    [
        ("alf", "ReplayBuffer"),
        ("objectrl", "ReplayBuffer"),
        ("torchrl", "ReplayBuffer"),
        ("rlinf", "TrajectoryReplayBuffer"),
    ],
)
def test_drop_ins_have_typed_keyword_options(module: str, face: str) -> None:
    made = getattr(importlib.import_module(f"trajstore.compat.{module}"), face)
    options = inspect.signature(made.__init__).parameters["options"]
    assert options.kind is options.VAR_KEYWORD
    assert str(options.annotation).startswith("Unpack[")
