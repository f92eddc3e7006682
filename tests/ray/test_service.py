"""The buffer as a service of Ray actors: in real actors, which are really killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray

import trajstore
from tests.support import ray_cluster
from trajstore import Field, Priorities, ReplayBuffer, Schema, Windows
from trajstore.errors import ClosedError, DataError, NotReadyError, StoreNotFoundError
from trajstore.ray import RayReplayBuffer, RayWriter

N_ENVS = 3
LIGHT = {"num_cpus": 0.1}  # Ray keeps a process ready for every CPU that it thinks there is
SCHEMA = Schema({"obs": Field("float32", (3,), final=True), "reward": Field("float32")})


SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    path = os.pathsep.join(map(str, (SCRIPTS, SCRIPTS.parent)))
    with ray_cluster.started(runtime_env={"env_vars": {"PYTHONPATH": path}}):
        yield


def step(i: int, n: int = N_ENVS, who: int = 0) -> dict[str, Any]:
    """Step i of some environments; every value says whose it is."""
    obs = np.stack([np.array([who, env, i], np.float32) for env in range(n)])
    return {"obs": obs, "reward": np.full(n, i, np.float32)}


def feed(writer: Any, start: int, stop: int, *, length: int = 10, who: int = 0) -> None:
    """Episodes of ``length`` steps, with a final observation."""
    for i in range(start, stop):
        is_last = np.full(N_ENVS, i % length == length - 1)
        final = {"obs": step(i + 1, who=who)["obs"] + 0.25} if is_last.any() else None  # no later step has it
        writer.append(step(i, who=who), envs=range(N_ENVS), truncated=is_last, final=final)


def episodes_of(url: str) -> list[tuple[str, list[tuple[int, int, int]]]]:
    """How each episode ended, and who, env and i of its steps."""
    store = trajstore.open(url)
    found = []
    for k, row in enumerate(store.episodes):
        obs = store.read_episode(k)["obs"][: row["length"]]
        found.append((row["end"], [tuple(map(int, values)) for values in obs]))
    return found


def kill(buffer: RayReplayBuffer, rank: int = 0) -> None:
    """End an actor's process as nothing could be prepared for, and wait until it is gone."""
    pid = buffer.stats()[rank]["pid"]
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}/stat").exists() and ") Z" not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.01)


@pytest.fixture
def started() -> Iterator[Any]:
    """Starts services that end with the test, whatever becomes of it."""
    made: list[RayReplayBuffer] = []

    def start(url: str, **options: Any) -> RayReplayBuffer:
        options = {"commit_seconds": None, "schema": SCHEMA, **options}
        options["actor_options"] = LIGHT | options.get("actor_options", {})
        made.append(RayReplayBuffer.start(url, fsync=False, **options))
        return made[-1]

    yield start
    for buffer in made:
        for actor in buffer._actors:
            ray.kill(actor)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayReplayBuffer]:
    """A service with 100 steps of every environment, for tests that do not mind what others append."""
    url = str(tmp_path_factory.mktemp("shared") / "store")
    options: dict[str, Any] = {"sample": Windows(length=2), "priorities": Priorities(), "commit_seconds": None}
    with RayReplayBuffer.start(url, schema=SCHEMA, fsync=False, actor_options=LIGHT, **options) as buffer:
        with buffer.writer() as writer:
            feed(writer, 0, 100)
        yield buffer


# ---- appending and sampling


def test_what_collectors_append_a_learner_samples(url: str, started: Any) -> None:
    buffer = started(url, sample=Windows(length=4), seed=3)
    assert repr(buffer) == f"<RayReplayBuffer {url}, 1 actors>"
    with buffer.writer() as writer:
        assert isinstance(writer, RayWriter)
        feed(writer, 0, 50)
    assert (buffer.n_steps, buffer.n_episodes, len(buffer)) == (150, 15, 150)
    assert buffer.n_windows() == 15 * 7
    for batch in (buffer.sample(64), *(b for b, _ in zip(buffer.batches(64), range(4), strict=False))):
        assert batch["obs"].shape == (64, 4, 3)
        assert torch.equal(batch["obs"][:, :, 2], batch["obs"][:, :1, 2] + torch.arange(4.0))
        assert torch.equal(batch["reward"], batch["obs"][:, :, 2])
        assert torch.equal(batch["index"][:, 2], batch["obs"][:, 0, 2].long() % 10)
        assert (batch["actor"] == batch["actor"][0]).all()


def test_batches_are_those_of_a_buffer_in_this_process(url: str, started: Any) -> None:
    options = {"sample": Windows.transitions(n_step=2), "seed": 5, "priorities": Priorities()}
    with ReplayBuffer(f"{url}-here", schema=SCHEMA, **options) as here:
        buffer = started(url, **options)
        feed(here, 0, 40)
        feed(buffer, 0, 40)
        buffer.flush()
        for i in range(6):  # the first over Ray, the others written into memory of this process
            wanted, batch = here.sample(16), buffer.sample(16)
            assert_same({**wanted, "actor": batch["actor"]}, batch)
            priority = torch.arange(16.0) + i
            here.update_priorities(wanted["index"], priority)
            assert buffer.update_priorities(batch, priority) == 0


def assert_same(wanted: Any, batch: Any) -> None:
    assert wanted.keys() == batch.keys()
    for key, value in wanted.items():
        if isinstance(value, dict):
            assert_same(value, batch[key])
        else:
            assert torch.equal(value, batch[key]), key


def test_every_verb_arrives_as_it_was_called(url: str, started: Any) -> None:
    schema = Schema(
        {"obs": Field("float32", (2,), final=True), "half": Field("bfloat16"), "reward": Field("float32")},
        episode={"success": bool},
    )
    with ReplayBuffer(f"{url}-here", schema=schema, fsync=False) as here:
        buffer = started(url, schema=schema)
        for target in (here, buffer.writer(block_steps=7)):
            use_every_verb(target)
            target.flush()
    buffer.close()
    wanted, came = trajstore.open(f"{url}-here"), trajstore.open(url)
    for name in ("length", "end", "return", "has_final", "success"):
        assert came.episodes[name].tolist() == wanted.episodes[name].tolist(), name
    assert came.episodes["metadata"].tolist() == wanted.episodes["metadata"].tolist()
    for k in range(len(wanted)):
        for path, values in wanted.read_episode(k).items():
            assert np.array_equal(came.read_episode(k)[path], values)


def use_every_verb(target: Any) -> None:
    def values(*lead: int) -> dict[str, Any]:
        return {
            "obs": np.arange(np.prod((*lead, 2)), dtype=np.float32).reshape(*lead, 2),
            "half": torch.ones(lead, dtype=torch.bfloat16),
            "reward": np.ones(lead, np.float32),
        }

    scratch = np.zeros(2, np.float32)
    for i in range(9):
        scratch[:] = i  # what was handed in may be used again
        single = {"obs": scratch, "half": torch.tensor(0.5, dtype=torch.bfloat16), "reward": 0.5 * i}
        target.append(single, terminated=i == 3, final={"obs": scratch + 1} if i == 3 else None)
    target.end_episode(0, truncated=True, final={"obs": scratch}, metadata={"success": True, "note": "x"})
    target.append(values(2), envs=[4, 2], truncated=[False, True])
    target.append(values(2), envs=torch.tensor([4, 2]), terminated=np.array([True, False]))
    target.abort_episode(2)
    target.extend(values(5, 2), terminated=np.eye(5, 2, dtype=bool), final={"obs": values(5, 2)["obs"]})
    target.add_episode(values(6), truncated=True, env=9, metadata={"success": False})


def test_what_is_sampled_is_shown_before_it_is_flushed_once_it_is_sent(url: str, started: Any) -> None:
    buffer = started(url)
    with pytest.raises(NotReadyError, match=r"no episode|nothing|no window|yet"):
        buffer.sample(4)
    assert not buffer.is_ready()
    with pytest.raises(TimeoutError, match="10 steps"):
        buffer.wait_ready(min_steps=10, timeout_s=0.1)
    writer = buffer.writer(block_steps=6)
    feed(writer, 0, 4)
    buffer.wait_ready(min_steps=12, timeout_s=120)
    assert buffer.sample(4)["obs"].shape == (4, 1, 3)
    assert len(trajstore.open(url).streams) <= 1  # nothing is committed, and one stream at the most is born
    assert writer.flush() == 0
    assert sum(trajstore.open(url).episodes["length"]) == 12


@ray.remote(num_cpus=0.1)
def collect(buffer: RayReplayBuffer, who: int, n: int, pause_s: float = 0.0) -> int:
    with buffer.writer(block_steps=16) as writer:
        for i in range(n):
            feed(writer, i, i + 1, who=who)
            time.sleep(pause_s)
        writer.flush()
        return writer.n_lost


@ray.remote(num_cpus=0.1)
def learn(buffer: RayReplayBuffer, n: int) -> list[float]:
    return [float(batch["reward"].sum()) for batch, _ in zip(buffer.batches(8), range(n), strict=False)]


def test_collectors_and_learners_are_tasks_and_never_share_an_environment(url: str, started: Any) -> None:
    buffer = started(url)
    assert ray.get([collect.remote(buffer, who, 40) for who in range(3)]) == [0, 0, 0]
    assert all(len(sums) == 3 for sums in ray.get([learn.remote(buffer, 3) for _ in range(2)]))
    found = episodes_of(url)
    assert len(found) == 3 * N_ENVS * 4
    for end, steps in found:
        who, env, first = steps[0]
        assert end == "truncated"
        assert steps == [(who, env, first + i) for i in range(10)]


def test_a_service_is_found_by_its_name(url: str, started: Any) -> None:
    buffer = started(url, name="replay", as_tensordict=True)
    feed(buffer, 0, 10)
    buffer.flush()
    again = RayReplayBuffer.connect("replay")
    assert (again.n_steps, again.url, again.n_actors) == (30, url, 1)
    assert again.sample(4).batch_size == torch.Size([4])
    assert again.sample(4)["obs"].shape == (4, 1, 3)
    with pytest.raises(StoreNotFoundError, match="no buffer named 'other'"):
        RayReplayBuffer.connect("other")


def test_a_function_restricts_what_is_drawn_and_stays_one_function(url: str, started: Any) -> None:
    buffer = started(url)
    feed(buffer, 0, 40)
    buffer.flush()

    def first(episodes: Any) -> Any:
        return episodes["episode"] < N_ENVS

    for _ in range(4):
        assert (buffer.sample(32, where=first)["obs"][:, 0, 2] < 10).all()
    assert (buffer.sample(32, recent_episodes=N_ENVS)["obs"][:, 0, 2] >= 30).all()
    assert len(buffer._sampler._shared_functions) == 1
    with pytest.raises(TypeError, match=r"sample\(\) got an unexpected keyword argument 'out'"):
        buffer.sample(4, out={})


def test_what_batches_hold_may_change_while_they_are_drawn(url: str, started: Any) -> None:
    buffer = started(url)
    feed(buffer, 0, 20)
    buffer.flush()
    iterator = buffer.batches(8)
    for _ in range(4):
        assert "advantage" not in next(iterator)
        assert "advantage" not in buffer.sample(8)
    column = {"name": "advantage", "field": Field("float32"), "fill": 7.0}
    ray.get(buffer._actors[0].call_buffer.remote("add_column", column))
    came = [next(iterator) for _ in range(8)][4:] + [buffer.sample(8) for _ in range(4)]
    for batch in came:
        assert (batch["advantage"] == 7).all()
        assert torch.equal(batch["reward"], batch["obs"][:, :, 2])
    assert "memfd:trajstore" in mapping_of(came[-1]["obs"])


# ---- memory


def mapping_of(tensor: torch.Tensor) -> str:
    """The name of the memory that a tensor lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(number, 16) for number in line.split()[0].split("-"))
        if low <= tensor.data_ptr() < high:
            return line
    raise AssertionError("no such memory")


def test_batches_lie_where_ray_or_the_actor_has_written_them(url: str, started: Any) -> None:
    buffer = started(url, schema=None)
    for _ in range(4):
        episode = {"obs": np.ones((64, 64, 64), np.uint8), "reward": np.ones(64, np.float32)}
        buffer.add_episode(episode, terminated=True)
    buffer.flush()
    first, second = buffer.sample(64), buffer.sample(64)
    assert "plasma" in mapping_of(first["obs"])
    assert "memfd:trajstore" in mapping_of(second["obs"])
    for batch in (first, second):
        batch["obs"].add_(1)  # it belongs to the caller
        assert (batch["obs"] == 2).all()


def test_memory_is_not_used_again_while_a_batch_is_held(shared: RayReplayBuffer) -> None:
    batches, kept = [], []
    for batch, _ in zip(shared.batches(8, prefetch=3), range(40), strict=False):
        batches.append(batch)
        kept.append(batch["obs"].clone())
    for _ in range(10):
        shared.sample(8)
    for batch, values in zip(batches, kept, strict=True):
        assert torch.equal(batch["obs"], values)
        assert torch.equal(batch["reward"], batch["obs"][:, :, 2])


def test_nothing_is_left_open_when_batches_and_buffers_are_gone(shared: RayReplayBuffer) -> None:
    buffer = shared
    buffer.sample(4)
    n_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        iterator = buffer.batches(4)
        for _ in range(4):
            next(iterator)
        iterator.close()
    del iterator
    assert len(os.listdir("/proc/self/fd")) == n_open


# ---- what goes wrong


def test_what_an_actor_refuses_is_raised_as_it_is_and_nothing_is_joined_across_it(url: str, started: Any) -> None:
    buffer = started(url)
    writer = buffer.writer(block_steps=N_ENVS, in_flight=16)
    feed(writer, 0, 3)
    writer.append({"obs": np.zeros((N_ENVS, 2), np.float32), "reward": np.zeros(N_ENVS, np.float32)}, envs=range(3))

    def feed_more() -> None:
        for i in range(4, 9):
            feed(writer, i, i + 1)
        writer.flush()

    with pytest.raises(DataError, match=r"field 'obs': expected float32 of shape \(1, 3, 3\), got .*\(1, 3, 2\)"):
        feed_more()
    feed(writer, 9, 10)
    assert writer.flush() == N_ENVS == writer.n_lost  # what was refused
    buffer.close()
    steps = sorted(tuple(steps) for _, steps in episodes_of(url))
    for env in range(N_ENVS):
        assert steps[2 * env] == tuple((0, env, i) for i in range(3))
        assert steps[2 * env + 1] == tuple((0, env, i) for i in range(4, 10))  # sent again, as new episodes


def test_what_is_wrong_with_a_call_is_said_at_once(shared: RayReplayBuffer) -> None:
    writer = shared.writer()
    assert writer.append(step(0), envs=range(N_ENVS)).t.tolist() == [0] * N_ENVS
    with pytest.raises(DataError, match="terminated: expected bool"):
        writer.append(step(1), envs=range(N_ENVS), terminated=True)
    with pytest.raises(DataError, match="envs: expected each environment once"):
        writer.append(step(1), envs=[0, 1, 1])
    with pytest.raises(DataError, match="env 2 has an open episode"):
        writer.add_episode(step(0), env=2)
    with pytest.raises(DataError, match="2 envs, but the data has 3 columns"):
        writer.extend({"obs": np.zeros((4, 3, 3), np.float32)}, envs=[5, 6])
    with pytest.raises(trajstore.EpisodeNotFoundError, match="env 7"):
        writer.abort_episode(7)
    handles = writer.append(step(1), envs=range(N_ENVS))
    assert (handles.episode.tolist(), handles.t.tolist()) == ([0, 1, 2], [1, 1, 1])
    assert writer.flush() == 0


def test_wrong_options_are_refused_before_anything_is_started(url: str) -> None:
    with pytest.raises(TypeError, match="unknown options"):
        RayReplayBuffer.start(url, size=3)
    with pytest.raises(ValueError, match="n_actors"):
        RayReplayBuffer.start(url, n_actors=0)
    with pytest.raises(ValueError, match="share='whole'"):
        RayReplayBuffer.start(url, share="whole")
    assert not Path(url).exists()


def test_a_store_that_can_not_be_opened_is_an_error_of_start(url: str) -> None:
    Path(url).mkdir()
    (Path(url) / "other").write_text("not a store")
    with pytest.raises(trajstore.StoreExistsError, match="not empty and not a store"):
        RayReplayBuffer.start(url)


def test_a_closed_service_says_so(url: str, started: Any) -> None:
    buffer = started(url)
    writer = buffer.writer()
    feed(writer, 0, 7)
    writer.close()
    with pytest.raises(ClosedError):
        writer.append(step(0), envs=range(N_ENVS))
    buffer.close()
    with pytest.raises(ClosedError, match=r"gone|closed"):
        buffer.sample(4)
    assert [end for end, _ in episodes_of(url)] == ["cut"] * N_ENVS


def test_a_bad_update_of_priorities_is_raised(shared: RayReplayBuffer) -> None:
    buffer = shared
    batch = buffer.sample(8)
    with pytest.raises(DataError, match=r"priority|finite"):
        buffer.update_priorities(batch, torch.full((8,), float("nan")))
    buffer.update_priorities(batch, torch.full((8,), float("nan")), wait=False)
    with pytest.raises(DataError, match=r"priority|finite"):
        buffer.update_priorities(batch, torch.ones(8))
    with pytest.raises(DataError, match=r"\(batch, 4\)"):
        buffer.update_priorities(batch["index"], torch.ones(8))
    named = torch.cat([batch["actor"][:, None], batch["index"]], 1)
    assert buffer.update_priorities(named, torch.ones(8)) == 0


def test_without_ray_the_error_names_the_extra() -> None:
    for module in ("ray", "ray.data"):
        code = f"import sys; sys.modules['ray'] = None; import trajstore.{module}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert "MissingExtraError" in done.stderr
        assert "pip install 'ray[data]>=2.40'" in done.stderr


# ---- actors that die


def test_what_flush_returned_for_survives_the_actor_and_open_episodes_read_as_cut(url: str, started: Any) -> None:
    buffer = started(url, priorities=Priorities(), sample=Windows(length=2))
    writer = buffer.writer(block_steps=N_ENVS)
    feed(writer, 0, 25)
    assert writer.flush() == 0
    feed(writer, 25, 28)  # sent, and not durable
    iterator = buffer.batches(8)
    before = [next(iterator) for _ in range(3)][-1]
    kill(buffer)
    after = [next(iterator) for _ in range(4)][-1]
    assert torch.equal(after["reward"], after["obs"][:, :, 2])
    assert buffer.update_priorities(before, torch.ones(8)) == 8  # from before the restart: ignored
    assert buffer.update_priorities(after, torch.ones(8)) == 0
    feed(writer, 28, 32)
    assert 0 < writer.flush() == writer.n_lost <= 4 * N_ENVS
    buffer.close()
    found = {env: [s for s in episodes_of(url) if s[1][0][1] == env] for env in range(N_ENVS)}
    for env, episodes in found.items():
        ends, steps = [end for end, _ in episodes], [[i for _, _, i in s] for _, s in episodes]
        assert [s for s in steps if s[0] < 25] == [list(range(10)), list(range(10, 20)), list(range(20, 25))], env
        assert ends[:3] == ["truncated", "truncated", "cut"]
        later = [i for s in steps if s[0] >= 25 for i in s]
        assert later == list(range(later[0], 32))  # nothing twice, no holes


def test_an_end_whose_steps_died_with_the_actor_is_no_error(url: str, started: Any) -> None:
    buffer = started(url)
    writer = buffer.writer(block_steps=N_ENVS)
    feed(writer, 0, 2)
    writer.flush()
    kill(buffer)
    assert buffer.n_steps == 2 * N_ENVS  # waits until it is back: what comes from now on is not lost on its way
    for env in range(N_ENVS):
        writer.end_episode(env, truncated=True)
    feed(writer, 3, 5)
    assert writer.flush() == 0
    with pytest.raises(trajstore.EpisodeNotFoundError, match="env 7 has no open episode"):
        writer.end_episode(7, truncated=True)
    assert sorted(len(steps) for _, steps in episodes_of(url)) == [2] * (2 * N_ENVS)
    assert sorted(end for end, _ in episodes_of(url)) == ["cut"] * N_ENVS + ["open"] * N_ENVS


@ray.remote(num_cpus=0.1)
def collect_until(buffer: RayReplayBuffer, who: int, stop: Path) -> tuple[int, int]:
    """Append until the file ``stop`` exists, and 20 steps more; returns how many steps were appended, and lost."""
    n_steps, until = 0, time.monotonic() + 300
    with buffer.writer(block_steps=16) as writer:
        while not stop.exists() and time.monotonic() < until:
            feed(writer, n_steps, n_steps + 1, who=who)
            n_steps += 1
            time.sleep(0.003)
        feed(writer, n_steps, n_steps + 20, who=who)
        writer.flush()
        return n_steps + 20, writer.n_lost


@pytest.mark.slow
def test_collectors_that_never_stop_lose_nothing_committed_and_nothing_is_torn(
    url: str, started: Any, tmp_path: Path
) -> None:
    buffer, stop = started(url, commit_seconds=0.2), tmp_path / "stop"
    refs = [collect_until.remote(buffer, who, stop) for who in range(2)]
    for _ in range(2):
        target, until = buffer.n_steps + 60, time.monotonic() + 120
        while buffer.n_steps < target:
            assert time.monotonic() < until
            time.sleep(0.02)
        kill(buffer)
    assert buffer.n_steps >= 60  # waits until the actor is back: what is sent from now on is not lost on its way
    stop.touch()
    n_steps, n_lost = zip(*ray.get(refs), strict=True)
    found = episodes_of(url)
    seen = [one for _, steps in found for one in steps]
    assert len(seen) == len(set(seen))  # nothing twice
    assert len(seen) >= N_ENVS * sum(n_steps) - sum(n_lost)  # what is not there was counted
    for _, steps in found:
        who, env, first = steps[0]
        assert steps == [(who, env, first + i) for i in range(len(steps))]
        assert first // 10 == steps[-1][2] // 10  # nothing is joined across an end
    pairs = [(who, env) for who in range(2) for env in range(N_ENVS)]
    last = {pair: max(i for who, env, i in seen if (who, env) == pair) for pair in pairs}
    assert last == {pair: n_steps[pair[0]] - 1 for pair in pairs}


def test_an_actor_that_may_not_be_restarted_is_an_error_and_not_a_wait(url: str, started: Any) -> None:
    buffer = started(url, actor_options={"max_restarts": 0})
    writer = buffer.writer(block_steps=N_ENVS)
    feed(writer, 0, 5)
    writer.flush()
    kill(buffer)
    with pytest.raises(ClosedError, match="not started again"):
        buffer.sample(4)
    with pytest.raises(ClosedError, match="not started again"):
        feed(writer, 5, 20)  # more than may be on their way
    assert sum(trajstore.open(url).episodes["length"]) == 5 * N_ENVS


# ---- checkpoints


def test_the_next_service_continues_a_checkpoint(url: str, started: Any) -> None:
    buffer = started(url, sample=Windows(length=3), seed=1)
    feed(buffer, 0, 40)
    buffer.flush()
    for _ in range(3):
        buffer.sample(8)
    name = buffer.save_checkpoint("middle")
    assert [c.id for c in trajstore.open(url).checkpoints] == [name]
    wanted = [buffer.sample(8) for _ in range(3)]
    feed(buffer, 40, 60)
    buffer.close()
    again = RayReplayBuffer.resume(url, "middle", fsync=False, actor_options=LIGHT)
    try:
        assert again.n_steps == 120
        for batch in wanted:
            came = again.sample(8)
            assert torch.equal(came["index"], batch["index"])
            assert torch.equal(came["obs"], batch["obs"])
        with pytest.raises(ValueError, match="keep_last"):
            again.save_checkpoint("next", keep_last=0)
        again.save_checkpoint("next", keep_last=1)
        assert [c.name for c in trajstore.open(url).checkpoints] == ["next"]
    finally:
        again.close()


# ---- several actors


def filled(buffer: RayReplayBuffer, *lengths: int) -> None:
    """Give every actor this many steps of each environment."""
    for rank, n in enumerate(lengths):
        with buffer.writer(actor=rank) as writer:
            feed(writer, 0, n, who=rank)


def test_every_window_of_the_union_is_equally_likely(url: str, started: Any) -> None:
    buffer = started(url, n_actors=2, sample=Windows(length=2), seed=11)
    filled(buffer, 10, 30)
    assert [stats["n_steps"] for stats in buffer.stats()] == [30, 90]
    assert buffer.n_windows() == 4 * N_ENVS * 9
    counts: dict[tuple[int, ...], int] = {}
    n = 108 * 100
    drawn = [buffer.sample(n // 4) for _ in range(2)]
    drawn += [batch for batch, _ in zip(buffer.batches(n // 4), range(2), strict=False)]
    for batch in drawn:
        assert torch.equal(batch["actor"] % 2, batch["obs"][:, 0, 0].long())
        for key in map(tuple, batch["obs"][:, 0].long().tolist()):
            counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 108
    # Chi-square with 107 degrees of freedom: above 156 once in a thousand seeds, and this one is fixed.
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 156


@pytest.mark.parametrize("normalize", ["batch", "buffer"])
def test_probabilities_and_weights_are_those_of_the_whole_draw(url: str, started: Any, normalize: Any) -> None:
    options = Priorities(alpha=0.5, beta=0.7, eps=0.0, normalize=normalize)
    buffer = started(url, n_actors=2, priorities=options, seed=2)
    filled(buffer, 10, 20)
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    while len(seen) < 90:
        batch = buffer.sample(64)
        rows = torch.cat([batch["actor"][:, None], batch["index"]], 1)
        seen |= {tuple(obs): row for obs, row in zip(batch["obs"][:, 0].long().tolist(), rows, strict=True)}

    def priority(who: int, env: int, i: int) -> float:
        return 1.0 + 5 * who + env + i

    named = torch.stack(list(seen.values()))
    assert buffer.update_priorities(named, torch.tensor([priority(*key) for key in seen])) == 0
    total = sum(priority(*key) ** 0.5 for key in seen)
    for _ in range(3):
        batch = buffer.sample(32)
        keys = [tuple(obs) for obs in batch["obs"][:, 0].long().tolist()]
        wanted = torch.tensor([priority(*key) ** 0.5 / total for key in keys], dtype=torch.float64)
        torch.testing.assert_close(batch["priority"]["probability"], wanted, rtol=1e-6, atol=0.0)
        least = wanted.min() if normalize == "batch" else 1.0 / total
        weight = (least / wanted).pow(0.7).float()
        torch.testing.assert_close(batch["priority"]["weight"], weight, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_any_of_several_actors_may_die(url: str, started: Any, rank: int) -> None:
    buffer = started(url, n_actors=2, sample=Windows(length=2))
    writers = [buffer.writer(block_steps=N_ENVS) for _ in range(2)]
    for who, writer in enumerate(writers):
        feed(writer, 0, 15, who=who)
        assert writer.flush() == 0
    iterator = buffer.batches(16)
    for _ in range(3):
        next(iterator)
    name = buffer.save_checkpoint("before")
    kill(buffer, rank)
    for _ in range(5):
        batch = next(iterator)
        assert torch.equal(batch["reward"], batch["obs"][:, :, 2])
    assert {0, 1} == set((buffer.sample(64)["actor"] % 2).tolist())
    assert [stats["n_steps"] for stats in buffer.stats()] == [45, 45]
    for who, writer in enumerate(writers):
        feed(writer, 15, 20, who=who)
        assert writer.flush() == 0
    assert buffer.n_steps == 120
    later = buffer.save_checkpoint("after")
    assert [c.id for c in trajstore.open(url).checkpoints] == [name, later]
    buffer.close()
    assert sum(trajstore.open(url, at="after").episodes["length"]) == 120


def test_a_checkpoint_of_two_actors_is_resumed_by_three(url: str, started: Any) -> None:
    buffer = started(url, n_actors=2, seed=4)
    filled(buffer, 20, 40)
    name = buffer.save_checkpoint("two")
    filled(buffer, 5, 5)
    buffer.close()
    again = RayReplayBuffer.resume(url, name, n_actors=3, fsync=False, actor_options=LIGHT)
    parts = [stats["n_steps"] for stats in again.stats()]
    assert (sum(parts), len(parts)) == (180, 3)
    assert again.sample(32)["obs"].shape == (32, 1, 3)
    again.close()


def test_an_actor_without_anything_is_never_asked(url: str, started: Any) -> None:
    buffer = started(url, n_actors=2)
    with pytest.raises(NotReadyError, match="no actor has a window"):
        buffer.sample(4)
    filled(buffer, 0, 10)
    for batch in (buffer.sample(16), *(b for b, _ in zip(buffer.batches(16), range(3), strict=False))):
        assert (batch["actor"] % 2 == 1).all()
    filled(buffer, 10)
    assert {0, 1} == set((buffer.sample(64)["actor"] % 2).tolist())


# ---- without a service


@ray.remote(num_cpus=0.1)
def read(url: str, seed: int) -> tuple[int, float]:
    reader = trajstore.Reader(trajstore.open(url), seed=seed)
    batch = reader.sample(32, Windows(length=2))
    return len(batch["obs"]), float(batch["reward"][:, 0].mean())


def test_any_number_of_tasks_sample_a_store_without_a_service(url: str) -> None:
    with trajstore.create(url, SCHEMA, fsync=False).writer() as writer:
        feed(writer, 0, 30)
    found = ray.get([read.remote(url, seed) for seed in range(4)])
    assert [n for n, _ in found] == [32] * 4
    assert len({mean for _, mean in found}) > 1


@pytest.mark.slow
def test_the_example_continues_after_it_kills_an_actor(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    import ray_example

    rounds = ray_example.run_rounds(url, n_rounds=3, n_steps=20, n_updates=5)
    assert [one.n_updates for one in rounds] == [5, 10, 15]
    assert [one.note for one in rounds] == ["", "killed actor 0", ""]
    assert rounds[0].pids[0] != rounds[1].pids[0]
    assert rounds[0].pids[1] == rounds[2].pids[1]
    assert len(ray_example.table(rounds).splitlines()) == 4
    assert trajstore.open(url).checkpoints[-1].name == "end"
