"""The command line: what it prints, how it ends, and what it never shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import trajstore
from tests.compat.test_rlinf import rlinf_directory, trajectory
from tests.conftest import Place
from tests.support.sharding import mark, read_record
from trajstore import Field, Schema
from trajstore.cli import app as cli
from trajstore.cli.info import print_info
from trajstore.cli.parameters import parse_storage_options
from trajstore.schema import nest
from trajstore.storage import LocalStorage
from trajstore.store.checkpoints import Checkpoint, new_checkpoint_id, save

ROOT = Path(__file__).resolve().parents[2]
SECRET = "wJalrXUtnFEMI-secret"
SCHEMA = Schema(
    {
        "observation": {
            "pixels": Field("uint8", (8, 8), final=True, chunk_rows=64),
            "state": Field("float32", (3,)),
        },
        "action": Field("int64"),
        "latent": Field("bfloat16", (2,)),
        "reward": Field("float32"),
    },
    episode={"success": bool, "task": str},
)


def run(*arguments: object) -> Result:
    """Run a command in this process, as a script would."""
    return CliRunner().invoke(cli.app(), [str(argument) for argument in arguments])


def run_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code in (0, 1), result.stderr
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def episode(n: int) -> dict[str, Any]:
    import ml_dtypes

    return {
        "observation": {"pixels": np.zeros((n + 1, 8, 8), np.uint8), "state": np.ones((n, 3), np.float32)},
        "action": np.arange(n),
        "latent": np.ones((n, 2), ml_dtypes.bfloat16),
        "reward": np.full(n, 0.5, np.float32),
    }


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cli") / "store"
    store = trajstore.create(root, SCHEMA, fsync=False)
    with store.writer("rank0", rank=0, world_size=2, world="w0", commit_seconds=None) as writer:
        writer.append_episode(episode(40), terminated=True, metadata={"success": True, "task": "walk"})
        writer.commit()
        writer.append_episode(episode(10), truncated=True)
        writer.commit()
        writer.put_column("advantage", writer.stream, np.ones(52, np.float32))
    saved = Checkpoint(new_checkpoint_id("half"), "half", 1e9, streams=store.refresh().cuts())
    save(store.snapshot.storage, saved, {"n": 1})
    with store.writer("rank1", rank=1, world_size=2, world="w0", commit_seconds=None) as writer:
        writer.append_episode(episode(60), terminated=True)
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path / "store")
    return tmp_path / "store"


def damage(root: Path) -> Path:
    path = next(root.glob("streams/rank0-*/steps/action/c.0"))
    path.write_bytes(path.read_bytes()[:-1])
    return path


# ---- info ----------------------------------------------------------------------------------------------


def test_info_shows_schema_streams_episodes_checkpoints_and_columns(template: Path) -> None:
    result = run("info", template)
    assert (result.exit_code, result.stderr) == (0, "")
    for part in (
        "observation/pixels",
        "uint8[8,8]",
        "zstd:1",
        "rank1-",
        "0/2",
        "w0",
        "sealed",
        "half",
        "advantage",
    ):
        assert part in result.stdout
    assert "3 episodes: 2 terminated, 1 truncated; 110 steps" in result.stdout
    assert "length: min 10, median 40, max 60" in result.stdout
    assert "return: mean 18.3333, min 5, max 30" in result.stdout


def test_info_as_json_holds_the_same(template: Path) -> None:
    facts = run_json("info", template)
    assert (facts["url"], facts["format"]) == (str(template), 1)
    assert [f["field"] for f in facts["schema"]["fields"]] == list(SCHEMA)
    assert facts["schema"]["fields"][0] == {
        "field": "observation/pixels", "dtype": "uint8", "shape": [8, 8], "final": True, "chunk_rows": [64],
        "object_rows": [64], "codec": ["blosc-zstd:1"],
    }  # fmt: skip
    assert [(s["rows"], s["state"], s["rank"], s["world"]) for s in facts["streams"]] == [
        (52, "sealed", 0, "w0"), (61, "sealed", 1, "w0"),
    ]  # fmt: skip
    assert facts["episodes"]["ends"] == {"terminated": 2, "truncated": 1}
    assert [(c["name"], c["rows"], c["parent"]) for c in facts["checkpoints"]] == [("half", 52, None)]
    assert [(c["name"], c["stop"]) for c in facts["columns"]] == [("advantage", 52)]


def test_a_column_that_several_sessions_wrote_is_counted_once(tmp_path: Path) -> None:
    store = trajstore.create(tmp_path / "store", fsync=False)
    with store.writer(commit_seconds=None) as first:
        first.append_episode({"reward": np.ones(5)}, terminated=True)
        first.commit()
        first.put_column("advantage", first.stream, np.ones(5))
    with store.writer(commit_seconds=None) as second:
        second.put_column("advantage", first.stream, np.zeros(5))
    assert re.search(r"advantage +float64 +1 +5 +0", run("info", tmp_path / "store").stdout)
    assert "<td>advantage</td><td>float64</td><td class='tj-n'>1</td>" in store.refresh()._repr_html_()


def test_info_reads_no_steps(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []
    for name in ("get", "get_into", "get_range"):
        original = getattr(LocalStorage, name)

        def spy(self: LocalStorage, key: str, *more: Any, original: Any = original) -> Any:
            keys.append(key)
            return original(self, key, *more)

        monkeypatch.setattr(LocalStorage, name, spy)
    assert run("info", template, "--sizes").exit_code == 0
    assert keys
    assert [key for key in keys if "/steps/" in key] == []


def test_sizes_are_those_of_the_objects(template: Path) -> None:
    field = run_json("info", template, "--sizes")["schema"]["fields"][0]
    files = [path for path in template.glob("streams/*/steps/observation/pixels/*") if path.is_file()]
    assert field["stored_bytes"] == sum(path.stat().st_size for path in files)
    assert field["decoded_bytes"] == 113 * 64
    assert f"{113 * 64 / field['stored_bytes']:.1f}x" in run("info", template, "--sizes").stdout


def test_info_at_a_checkpoint_shows_what_it_holds(template: Path) -> None:
    facts = run_json("info", template, "--at", "half")
    assert [s["rows"] for s in facts["streams"]] == [52]
    assert facts["episodes"]["n_episodes"] == 2
    assert run_json("info", template, "--at", "latest")["episodes"] == facts["episodes"]


def test_an_empty_store_is_shown(url: str) -> None:
    trajstore.create(url)
    result = run("info", url)
    assert result.exit_code == 0
    assert "No schema yet" in result.stdout
    assert "No streams yet" in result.stdout


def test_returns_that_are_not_finite_are_null_in_json(url: str) -> None:
    with trajstore.create(url, fsync=False).writer() as writer:
        writer.append_episode({"o": np.zeros(2), "reward": np.array([np.inf, 1.0])}, terminated=True)
    assert run_json("info", url)["episodes"]["return"] == {"mean": None, "min": None, "max": None}


@pytest.mark.parametrize("width", [80, 100])
def test_tables_fit_a_terminal(template: Path, width: int) -> None:
    facts = run_json("info", template, "--sizes")
    console = Console(width=width, record=True, file=sys.stderr, quiet=False, markup=False, highlight=False)
    with console.capture() as captured:
        print_info(console, facts)
    lines = captured.get().splitlines()
    assert max(len(line) for line in lines) <= width
    assert any(facts["streams"][0]["id"] in line for line in lines)  # in one piece, to be copied
    assert any("observation/pixels" in line for line in lines)


def test_text_of_a_store_does_not_steer_the_terminal(url: str) -> None:
    with trajstore.create(url, fsync=False).writer() as writer:
        writer.append_episode({"o": np.zeros(2), "reward": np.zeros(2)}, terminated=True)
    mark(Path(url), read_record(Path(url), writer.stream), world="\x1b[2Jgone\x07")
    result = run("info", url)
    assert "gone" in result.stdout
    assert "\x1b" not in result.stdout
    assert "\x07" not in result.stdout


# ---- sample --------------------------------------------------------------------------------------------


def test_sample_shows_keys_shapes_and_figures(template: Path) -> None:
    result = run("sample", template, "--batch", 16, "--window", 8, "--n-step", 2)
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.search(r"observation/pixels +16x8x8x8 +uint8 +0 +0 +0\b", result.stdout)
    assert re.search(r"latent +16x8x2 +bfloat16 +1 +1 +1\b", result.stdout)
    for part in ("n_step/return", "16x3", "steps per second", "everything fits; ", "compressed"):
        assert part in result.stdout


def test_sample_as_json_holds_the_same(template: Path) -> None:
    facts = run_json("sample", template, "--batch", 4, "--window", 8, "--n", 3, "--fields", "action,reward")
    by_key = {t["key"]: t for t in facts["batch"]}
    assert "observation/pixels" not in by_key
    assert by_key["reward"] == {
        "key": "reward", "shape": [4, 8], "dtype": "float32", "min": 0.5, "max": 0.5, "mean": 0.5,
    }  # fmt: skip
    assert facts["n_windows"] == 33 + 3 + 53
    assert facts["cache"]["misses"] > 0
    assert facts["steps_per_second"] > 0


def test_the_seed_decides_what_is_sampled(template: Path) -> None:
    one, same, other = (run_json("sample", template, "--seed", seed)["batch"] for seed in (1, 1, 2))
    assert one == same != other


def test_sample_at_a_checkpoint_draws_from_what_it_holds(template: Path) -> None:
    assert run_json("sample", template, "--at", "half", "--window", 8)["n_windows"] == 33 + 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--window", 1000), "1000"),
        (("--window", 0), "length: expected an integer from 1"),
        (("--batch", 0), "batch"),
        (("--n", 0), "--n: expected at least 1, got 0"),
        (("--boundary", "soft"), "boundary: expected one of strict"),
        (("--fields", "action,nothing"), "no field 'nothing'"),
        (("--device", "nothing"), "nothing"),
        (("--cache-bytes", "much"), "cache_bytes: expected bytes"),
        (("--disk-cache", "/somewhere"), "--disk-cache: expected DIRECTORY,BYTES, got '/somewhere'"),
        (("--disk-cache", "/somewhere,much"), "--disk-cache: budget_bytes"),
        (("--at", "nothing"), "no checkpoint 'nothing'"),
    ],
    ids=str,
)
def test_what_cannot_be_sampled_is_said_in_one_line(
    template: Path, arguments: tuple[Any, ...], message: str
) -> None:
    result = run("sample", template, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("trajstore: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_damage_met_while_sampling_is_a_problem_of_the_store(root: Path) -> None:
    damage(root)
    result = run("sample", root, "--window", 8)
    assert result.exit_code == 1
    assert re.match(r"trajstore: .*stream 'rank0-.*', array 'steps/action', chunk 0 .*\n\Z", result.stderr)


def test_sample_of_a_store_that_does_not_fit_counts_hits_and_evictions(url: str) -> None:
    with trajstore.create(
        url, Schema({"o": Field("float64", (64,), chunk_rows=256)}), fsync=False
    ).writer() as writer:
        writer.append_episode({"o": np.zeros((10_000, 64))}, terminated=True)
    shown = run("sample", url, "--batch", 4, "--window", 8, "--n", 30, "--cache-bytes", "2MiB").stdout
    assert re.search(r"Cache: [\d,]+ hits, [\d,]+ misses, [1-9][\d,]* evictions", shown)


# ---- verify --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [(), ("--fast",)])
def test_a_healthy_store_is_verified(template: Path, fast: tuple[str, ...]) -> None:
    result = run("verify", template, *fast)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Checked 2 streams, 3 episodes, 113 rows" in result.stdout
    assert "No problems." in result.stdout


def test_problems_are_listed_and_end_with_1(root: Path) -> None:
    damage(root)
    next(root.glob("streams/rank1-*/steps/reward/c.0")).unlink()
    (root / "scratch" / "left.tmp").write_text("x")
    result = run("verify", root)
    assert result.exit_code == 1
    assert len(re.findall("^problem: ", result.stdout, re.M)) == 2
    assert len(re.findall("^note: scratch", result.stdout, re.M)) == 1
    assert "2 problems." in result.stdout
    facts = run_json("verify", root)
    assert (facts["is_clean"], len(facts["problems"]), len(facts["notes"])) == (False, 2, 1)
    assert facts["problems"][0]["where"].endswith("array 'steps/action', chunk 0 (rows 0 to 52)")


def test_a_store_too_damaged_to_be_opened_is_verified(root: Path) -> None:
    next(root.glob("streams/rank0-*/zarr.json")).write_text("{}")
    assert run("info", root).exit_code == 1
    result = run("verify", root)
    assert result.exit_code == 1
    assert "commit record" in result.stdout


def test_verify_at_a_checkpoint_looks_at_what_it_holds(root: Path) -> None:
    next(root.glob("streams/rank1-*/steps/reward/c.0")).unlink()
    assert run("verify", root, "--at", "half").exit_code == 0
    damage(root)
    assert run("verify", root, "--at", "half").exit_code == 1


DAMAGES = {
    "a record": lambda root: next(root.glob("streams/rank0-*/zarr.json")).write_text("{}"),
    "half a record": lambda root: (p := next(root.glob("streams/rank0-*/zarr.json"))).write_bytes(
        p.read_bytes()[:900]
    ),
    "a flipped bit": lambda root: (p := next(root.glob("streams/rank0-*/zarr.json"))).write_text(
        p.read_text().replace('"rows":52', '"rows":51')
    ),
    "the schema": lambda root: (root / "schema" / "zarr.json").write_text("[]"),
    "a span table": lambda root: next(root.glob("streams/rank0-*/spans/ints/c.0.0")).write_bytes(b"x"),
    "a lost span table": lambda root: next(root.glob("streams/rank0-*/spans/floats/c.0.0")).unlink(),
}


@pytest.mark.parametrize("command", ["info", "sample", "verify"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_store_ends_every_command_with_1(root: Path, command: str, kind: str) -> None:
    DAMAGES[kind](root)
    more = ("--window", 8) if command == "sample" else ()
    result = run(command, root, *more)
    assert result.exit_code == 1, result.stderr
    assert command == "verify" or result.stderr.count("\n") == 1
    assert command == "verify" or "'trajstore verify' lists all damage" in result.stderr


def test_a_damaged_checkpoint_ends_info_with_1(root: Path) -> None:
    next(root.glob("checkpoints/half-*/zarr.json")).write_text("{}")
    for arguments in (("info", root), ("checkpoints", root), ("sample", root, "--at", "half", "--window", 8)):
        assert run(*arguments).exit_code == 1


@pytest.mark.parametrize("command", ["info", "sample"])
def test_a_newer_format_and_a_foreign_directory_end_with_2(root: Path, command: str) -> None:
    record = next(root.glob("streams/rank0-*/zarr.json"))
    record.write_text(record.read_text().replace('"format":1', '"format":2'))
    assert run(command, root).exit_code == 2
    (root / "zarr.json").write_text("{}")
    assert run(command, root).exit_code == 2


# ---- checkpoints ---------------------------------------------------------------------------------------


def test_checkpoints_are_listed(template: Path, url: str) -> None:
    result = run("checkpoints", template)
    assert result.exit_code == 0
    assert re.search(r"half +2001-09-09 01:46 +1 +1 +52 +half-", result.stdout)
    assert [c["name"] for c in run_json("checkpoints", template)["checkpoints"]] == ["half"]
    trajstore.create(url)
    assert "No checkpoints." in run("checkpoints", url).stdout


# ---- errors, credentials, colours ----------------------------------------------------------------------

OF_STORES = sorted(cli.COMMANDS.keys() - {"warm-up"})
MORE = {
    **{"show": ("0",), "diff": ("unused",), "copy": ("unused",), "merge": ("unused",), "repair": ("unused",)},
    **{"split": ("unused=0.5",), "evict": ("--steps", "1")},
}  # follow the store
MAKES_STORES = {"bench", "merge"}


@pytest.mark.parametrize("command", sorted({*OF_STORES} - MAKES_STORES))
def test_no_store_is_said_in_one_line(command: str, tmp_path: Path) -> None:
    result = run(command, tmp_path / "nothing", *MORE.get(command, ()))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"trajstore: {tmp_path / 'nothing'}: there is no store here\n"


def test_a_directory_of_stores_is_said_to_be_one(template: Path) -> None:
    result = run("info", template.parent)
    assert result.exit_code == 2
    assert "there is no store here; it holds the stores store\n" in result.stderr


@pytest.mark.parametrize("command", OF_STORES)
def test_a_store_in_memory_is_refused(command: str) -> None:
    result = run(command, "memory://x", *MORE.get(command, ()))
    assert result.exit_code == 2
    assert "stores end with their process" in result.stderr


@pytest.mark.parametrize("command", OF_STORES)
@pytest.mark.parametrize(
    "pairs",
    [
        [f"secret={SECRET}"],  # a directory takes none
        [SECRET],  # no key
        [f"a={{{SECRET}"],  # no JSON
        [f"a={SECRET}", f"a.b={SECRET}"],
        [f'a={{"secret": "{SECRET}"}}'],
    ],
    ids=str,
)
def test_storage_options_are_never_shown(command: str, pairs: list[str], template: Path) -> None:
    options = [part for pair in pairs for part in ("--storage-option", pair)]
    result = run(command, template, *MORE.get(command, ()), *options)
    assert result.exit_code == 2
    assert SECRET not in result.output
    assert result.stderr.startswith("trajstore: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.s3
def test_trajectories_of_rlinf_reach_an_object_store_by_options_that_are_not_shown(
    new_place: Any, tmp_path: Path
) -> None:
    place: Place = new_place("s3")
    endpoint = place.options["client_kwargs"]["endpoint_url"]
    given = ["key=test-key", "secret=test-secret", f"client_kwargs.endpoint_url={endpoint}"]
    options = [part for pair in given for part in ("--storage-option", pair)]
    rlinf_directory(tmp_path / "run", {n: trajectory(n) for n in range(3)})
    shown = [
        run("rlinf", "import", tmp_path / "run", place.url, *options),
        run("rlinf", "sample", "--load-path", place.url, "--sample-window-size", 2, "--json", *options),
        run("rlinf", "export", place.url, tmp_path / "out", *options),
        run("rlinf", "export", place.url + "-not", tmp_path / "other", *options),
    ]
    assert [result.exit_code for result in shown] == [0, 0, 0, 2], [result.stderr for result in shown]
    assert json.loads(shown[1].stdout)["num_trajectories"] == 2
    for result in shown:
        assert not any(secret in result.output for secret in ("test-key", "test-secret", endpoint))


def test_an_unexpected_failure_shows_no_storage_options(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, storage_options: dict[str, Any], **__: Any) -> None:
        raise RuntimeError(f"could not log in with {storage_options}")

    monkeypatch.setattr(trajstore, "open", fail)
    result = run("info", template, "--storage-option", f"secret={SECRET}", "--storage-option", "region=eu")
    assert result.exit_code == 2
    assert "RuntimeError: could not log in with" in result.stderr
    assert SECRET not in result.output


@pytest.mark.s3
def test_an_object_store_is_reached_with_options_that_are_not_shown(new_place: Any, tmp_path: Path) -> None:
    place: Place = new_place("s3")
    endpoint = place.options["client_kwargs"]["endpoint_url"]
    with trajstore.create(place.url, SCHEMA, **place.kwargs).writer(commit_seconds=None) as writer:
        writer.append_episode(episode(40), terminated=True)
    options = ["--storage-option", "key=test-key", "--storage-option", "secret=test-secret",
               "--storage-option", f"client_kwargs.endpoint_url={endpoint}"]  # fmt: skip
    shown = [
        run("info", place.url, "--sizes", *options),
        run("sample", place.url, "--batch", 4, "--window", 8, "--disk-cache", f"{tmp_path}/disk,1MB", *options),
        run("verify", place.url, *options),
        run("checkpoints", place.url, *options),
        run("info", place.url + "-not", *options),
    ]
    assert [result.exit_code for result in shown] == [0, 0, 0, 0, 2]
    for result in shown:
        assert not any(secret in result.output for secret in ("test-key", "test-secret", endpoint))
    assert any(path.is_file() for path in (tmp_path / "disk" / "trajstore-1" / "objects").rglob("*"))


def test_options_nest_and_are_json_where_they_look_so() -> None:
    pairs = ["key=123", "anon=true", "token=a=b", 'kwargs={"x": 1}', "config.retries.mode=fast"]
    assert parse_storage_options(pairs) == {
        "key": "123",
        "anon": True,
        "token": "a=b",
        "kwargs": {"x": 1},
        "config": {"retries": {"mode": "fast"}},
    }


def test_wrong_usage_ends_with_2(template: Path) -> None:
    assert run("info").exit_code == 2
    assert run("nothing", template).exit_code == 2
    assert run("sample", template, "--batch", "many").exit_code == 2


@pytest.mark.parametrize(
    "command", [("info",), ("verify",), ("info", "--json"), ("sample", "--window", 8)], ids=str
)
def test_there_are_no_colours_where_there_is_no_terminal(command: tuple[Any, ...], root: Path) -> None:
    if command[0] == "verify":
        damage(root)
    result = run(command[0], root, *command[1:])
    assert result.stdout
    assert "\x1b" not in result.output


@pytest.mark.parametrize("command", [*OF_STORES, "rlinf import", "rlinf export", "rlinf sample"])
def test_every_command_and_option_has_help(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    for option in ("--storage-option", "--json", "--help"):
        assert option in result.output


# ---- the entry point -----------------------------------------------------------------------------------


def entry_point() -> str:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, name = scripts["trajstore"].split(":")
    return f"from {module} import {name}; {name}()"


def run_process(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)


def test_the_entry_point_runs_a_command(template: Path) -> None:
    result = run_process(entry_point(), "verify", template, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["is_clean"]


def test_without_typer_the_entry_point_names_the_extra() -> None:
    result = run_process(f"import sys; sys.modules['typer'] = None; {entry_point()}", "info", "x")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "trajstore: the command line needs typer: pip install typer\n"


def test_the_version_is_shown() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"trajstore {trajstore.__version__}\n")


def test_the_package_runs_as_a_module(template: Path) -> None:
    result = run_process("import runpy; runpy.run_module('trajstore', run_name='__main__')", "verify", template)
    assert (result.returncode, result.stderr) == (0, "")
    assert "No problems." in result.stdout


def test_the_module_can_be_imported_without_its_extra_and_without_torch() -> None:
    code = "import sys, trajstore.cli.app; print(sorted({'typer', 'rich', 'torch', 'zarr'} & sys.modules.keys()))"
    assert run_process(code).stdout == "[]\n"


# ---- the document --------------------------------------------------------------------------------------


def test_every_command_and_option_of_the_document_exists() -> None:
    text = (ROOT / "docs" / "cli.md").read_text("utf-8")
    lines = re.findall(r"^ *(?:\$ )?trajstore ([a-z-]+)\b(.*)$", text, re.M)
    assert {name for name, _ in lines} == {*cli.COMMANDS, "import", "export", "rlinf"}
    for name, rest in lines:
        known = run(name, "--help").output
        for option in re.findall(r"--[a-z-]+", rest):
            assert re.search(rf"{option}\b", known), f"trajstore {name} has no {option}"


def test_info_counts_an_added_field_only_where_it_is_stored(root: Path) -> None:
    added = {**nest(SCHEMA.fields), "speed": Field("float64", fill=0, chunk_rows=8)}
    schema = Schema(added, episode=SCHEMA.episode, reward=SCHEMA.reward)
    with trajstore.create(root, schema, exist_ok=True).writer() as writer:
        writer.append_episode({**episode(5), "speed": np.ones(5)}, terminated=True)
    speed = run_json("info", "--sizes", root)["schema"]["fields"][-1]
    assert (speed["field"], speed["chunk_rows"]) == ("speed", [8])
    n_rows = trajstore.open(root).streams[-1].rows
    assert speed["decoded_bytes"] == 8 * n_rows
