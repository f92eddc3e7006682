"""What dir(), help() and editors show is what users call; internals are importable, but not listed."""

from __future__ import annotations

import importlib
import pydoc
import subprocess
import sys
import typing
from types import ModuleType

import pytest

import trajstore
from trajstore.sampling.batch_iterator import BatchIterator

PUBLIC_PACKAGES = {"compat", "datasets", "logging", "plot", "ray", "testing", "viewer"}
LISTED = {
    "trajstore.compat": {"alf", "gymnasium", "objectrl", "rlinf", "stable_baselines3", "torchrl"},
    "trajstore.datasets": {
        "conversion", "d4rl", "diffusion_policy", "formats", "lerobot", "minari", "robomimic", "torchrl",
    },
    "trajstore.testing": {"conformance", "model", "strategies"},
}  # fmt: skip
WITH_NAMES = (
    "trajstore.compat.alf",
    "trajstore.compat.gymnasium",
    "trajstore.compat.rlinf",
    "trajstore.compat.torchrl",
    "trajstore.datasets.diffusion_policy",
    "trajstore.datasets.lerobot",
    "trajstore.datasets.minari",
    "trajstore.datasets.torchrl",
    "trajstore.logging",
    "trajstore.plot",
    "trajstore.ray",
    "trajstore.viewer",
)


def plain(module: ModuleType) -> set[str]:
    return {name for name in dir(module) if not name.startswith("__")}


def test_dir_lists_the_public_names_and_no_others() -> None:
    trajstore.ReplayBuffer  # noqa: B018 - loads what it is made of
    assert plain(trajstore) == {*trajstore.__all__, *PUBLIC_PACKAGES}
    assert {"ReplayBuffer", "Windows", "Reader", "Priorities", "Batch"} <= plain(trajstore)
    assert "__version__" in dir(trajstore)


def test_every_listed_name_exists_and_has_a_docstring() -> None:
    for name in trajstore.__all__:
        assert getattr(trajstore, name).__doc__, name


def test_help_shows_the_classes_that_users_call() -> None:
    text = pydoc.plain(pydoc.render_doc(trajstore))
    for name in ("ReplayBuffer", "Windows", "Reader", "Priorities", "Store", "Retention", "Mixture"):
        assert f"class {name}(" in text, name


def test_listing_names_does_not_load_torch() -> None:
    code = "import sys, trajstore; dir(trajstore); assert 'torch' not in sys.modules and 'zarr' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_public_packages_need_no_import_of_their_own() -> None:
    code = "import trajstore; trajstore.datasets.conversion.import_episodes; trajstore.compat.gymnasium.Recorder"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("name", LISTED)
def test_a_package_lists_its_public_modules(name: str) -> None:
    package = importlib.import_module(name)
    assert plain(package) == LISTED[name]
    for module in LISTED[name]:
        assert getattr(package, module).__name__ == f"{name}.{module}"
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'"):
        package.nothing  # noqa: B018


@pytest.mark.parametrize("name", WITH_NAMES)
def test_a_package_lists_its_public_names(name: str) -> None:
    package = importlib.import_module(name)
    assert plain(package) == set(package.__all__)


def test_what_gives_batches_says_so() -> None:
    reader, buffer, mixture = trajstore.Reader, trajstore.ReplayBuffer, trajstore.Mixture
    calls = [reader.sample, reader.at, reader.sample_episodes, buffer.sample, buffer.at, buffer.sample_episodes]
    calls += [mixture.sample]
    for call in (*calls, BatchIterator.__next__):
        assert typing.get_type_hints(call)["return"] == trajstore.Batch, call
