"""How fast are the loops that people run? Each beside the buffers they use today, and a bare gather of the rows."""

from __future__ import annotations

import argparse
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import _peers as peers
import numpy as np
import torch
from _comparison import BUSY, Run, Target, summary
from _harness import Case, Report, arguments, scratch
from _peers import BARE, CPPRB, ISOLATES, MEMMAP, MULTI_STEP, OURS, PLAIN, SB3, SEQUENCE, TORCHRL, Actions, Steps
from rich.console import Console
from windows import threads, within

from trajstore import Priorities, ReplayBuffer, Windows

BATCH = 256
BATCHES = (32, 256, 4096)
FIELDS = (1, 6, 40)
SHAPES = ((256, 32), (16, 64), (1024, 4), (64, 200))
TRANSITIONS = Windows.transitions()
N_STEP = Windows.transitions(n_step=peers.N_STEP, gamma=peers.GAMMA)
PYTHON_US = 60
FRAME = (64, 64, 3)
FRAME_EPISODE = 500


@contextmanager
def opened(n_bytes: int, **options: Any) -> Iterator[ReplayBuffer]:
    """A buffer on disk, with its defaults, whose cache has room for everything."""
    with scratch() as directory:
        cache_bytes = 2 * n_bytes + (512 << 20)
        with ReplayBuffer(directory / "store", cache_bytes=cache_bytes, exist="fail", **options) as buffer:
            yield buffer


@contextmanager
def filled(steps: Steps, **options: Any) -> Iterator[ReplayBuffer]:
    with opened(steps.n_bytes, **options) as buffer:
        for episode in steps.episodes():
            buffer.add_episode(episode, terminated=True)
        make_resident(buffer)
        yield buffer


def make_resident(buffer: ReplayBuffer) -> None:
    """Draw until nothing is missing in the cache any more."""
    buffer.flush()
    misses, quiet, rows = 0, 0, Windows()
    while quiet < 4:
        for _ in range(16):
            buffer.sample(1024, rows, prioritised=False)
        found = buffer.reader.stats()["misses"]
        misses, quiet = found, quiet + 1 if found == misses else 0


def appends(buffer: ReplayBuffer, steps: Steps) -> peers.Action:
    """Appends one step, as a training loop does it."""
    step, final = steps.step(), {"observation": steps.observations[1]}
    append = partial(buffer.append, step, final=final)
    return peers.every(peers.EPISODE, partial(append, terminated=False), partial(append, terminated=True))


# single transitions


def peers_of_transitions(run: Run, steps: Steps, directory: Path | None = None) -> Callable[[int], Actions]:
    """What the peers do for a batch of so many; only with a directory also those that store in files."""
    columns, makers = steps.transitions, {}
    if run.has(TORCHRL):
        forms = peers.torchrl_forms(peers.torchrl_storage(columns))
        if directory is not None:
            forms[MEMMAP] = peers.torchrl_forms(peers.torchrl_storage(columns, directory / "memmap"))[TORCHRL]
        makers |= {who: lambda n, buffer=buffer: partial(buffer.sample, n) for who, buffer in forms.items()}
    if run.has(CPPRB):
        makers[CPPRB] = partial(peers.cpprb_samples, peers.cpprb_buffer(columns))
    if steps.fields.keys() == {"action", "reward"} and run.has(SB3):
        makers[SB3] = partial(peers.sb3_samples, peers.sb3_buffer(columns))
    makers[BARE] = partial(peers.bare_transitions, steps)
    return lambda n: {who: make(n) for who, make in makers.items()}


def check_transitions(actions: Actions, n: int, n_step: int = 1) -> None:
    """That everyone returns the same things of a batch."""
    for who, action in actions.items():
        batch = action()
        if who == SB3:
            now, after, rest = batch.observations, batch.next_observations, (batch.rewards, batch.actions)
        else:
            nested = who not in (CPPRB, BARE)
            now, after = batch["observation"], batch["next"]["observation"] if nested else batch["next"]
            rest = tuple(batch[name] for name in ("action",) if name in batch)
        assert now.shape == after.shape == (n, peers.STATE), who
        assert all(isinstance(x, torch.Tensor) and len(x) == n for x in rest), who
        if who == CPPRB and n_step > 1:  # what it returns after the end of an episode, its flag masks
            now, after = (rows[batch["done"].view(-1) == 0] for rows in (now, after))
        peers.assert_follows(now, after, n_step, who)


def transitions(run: Run) -> None:
    """Batches of several sizes; three times TorchRL and twice a bare gather for the one of 256."""
    steps = run.shared_steps()
    with scratch() as directory, filled(steps) as buffer:
        others = peers_of_transitions(run, steps, directory)
        for n in BATCHES:
            actions = {OURS: partial(buffer.sample, n, TRANSITIONS), **others(n)}
            check_transitions(actions, n)
            run.compare(f"{n:,} transitions", actions, transition_targets(n == BATCH))


def transition_targets(is_target: bool) -> list[Target]:
    def wanted(value: float) -> float | None:
        return value if is_target else None

    return [
        *(Target(who, wanted(3)) for who in (TORCHRL, PLAIN)),
        *(Target(who) for who in (MEMMAP, CPPRB, SB3)),
        Target(BARE, wanted(2), at_most=True),
    ]


def fields(run: Run) -> None:
    """The same with fewer and with more fields."""
    for n_fields in FIELDS:
        steps = peers.steps_of(run.n_steps, n_fields)
        with filled(steps) as buffer:
            others = peers_of_transitions(run, steps)(BATCH)
            actions = {OURS: partial(buffer.sample, BATCH, TRANSITIONS), **others}
            check_transitions(actions, BATCH)
            label = f"{BATCH} transitions, {n_fields} field{'s' * (n_fields > 1)}"
            run.compare(label, actions, transition_targets(is_target=False))


def quarter(run: Run) -> None:
    """A cache of a quarter of the steps; both read files that the system has in memory."""
    steps = run.shared_steps()
    with scratch() as directory:
        path, cache_bytes = directory / "store", max(steps.n_bytes // 4, 1 << 20)
        with ReplayBuffer(path, exist="fail") as buffer:
            for episode in steps.episodes():
                buffer.add_episode(episode, terminated=True)
        actions: Actions = {}
        if run.has(TORCHRL):
            storage = peers.torchrl_storage(steps.transitions, directory / "memmap")
            actions[MEMMAP] = partial(peers.torchrl_forms(storage)[TORCHRL].sample, BATCH)
        with ReplayBuffer(path, exist="join", cache_bytes=cache_bytes) as buffer:
            actions = {OURS: partial(buffer.sample, BATCH, TRANSITIONS), **actions}
            check_transitions(actions, BATCH)
            run.compare(f"{BATCH} transitions, cache of a quarter", actions, [Target(MEMMAP, 0.5)])


def prioritised(run: Run) -> None:
    """A batch drawn by priority, with weights, and its priorities changed."""
    steps, new = run.shared_steps(), torch.rand(BATCH)
    columns = steps.transitions
    options = Priorities(alpha=peers.ALPHA, beta=peers.BETA)
    with filled(steps, priorities=options) as buffer:
        buffer.update_priorities(handles(buffer, steps), torch.rand(steps.n_steps))

        def turn() -> Any:
            batch = buffer.sample(BATCH, TRANSITIONS)
            buffer.update_priorities(batch["index"], new)
            return batch

        actions = {OURS: turn}
        if run.has(CPPRB):
            actions |= peers.cpprb_prioritised(columns, BATCH)
        if run.has(TORCHRL):
            try:
                actions |= peers.torchrl_prioritised(columns, BATCH)
            except RuntimeError:
                run.report.notes.append("TorchRL's C++ extension can't be loaded: prioritised only without it")
        check_transitions(actions, BATCH)
        assert turn()["priority"]["weight"].shape == (BATCH,)
        run.compare(f"{BATCH} prioritised, update", actions, [Target(CPPRB, 1.5), Target(TORCHRL)])


def handles(buffer: ReplayBuffer, steps: Steps) -> torch.Tensor:
    """Those of all steps."""
    index = torch.zeros(steps.n_steps, 3, dtype=torch.int64)
    index[:, 0] = buffer.sample(1, TRANSITIONS)["index"][0, 0]
    lengths = np.diff(steps.stops, prepend=0)
    index[:, 1] = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    index[:, 2] = torch.from_numpy(np.arange(steps.n_steps) - np.repeat(steps.stops - lengths, lengths))
    return index


# loops that append


def dqn(run: Run, n: int = 32) -> None:
    """One step appended to a full buffer, then a batch with n-step returns."""
    steps = run.shared_steps()
    columns = steps.transitions
    with filled(steps, capacity=steps.n_steps) as buffer:
        samples: Actions = {OURS: partial(buffer.sample, n, N_STEP)}
        adds: Actions = {OURS: appends(buffer, steps)}
        turns: Actions = {}
        if run.has(TORCHRL):
            storage = peers.torchrl_storage(columns)
            for who, peer in peers.torchrl_forms(storage).items():
                samples[who] = partial(peer.sample, n)
                adds[who] = peers.torchrl_adds(peer, storage[0].clone())
            turns[MULTI_STEP] = peers.torchrl_multi_step(columns, n)
        if run.has(CPPRB):
            peer = peers.cpprb_buffer(columns, steps.stops)
            samples[CPPRB], adds[CPPRB] = peers.cpprb_samples(peer, n), peers.cpprb_adds(peer, columns)
        if run.has(SB3):
            peer = peers.sb3_buffer(columns, n_step=True)
            samples[SB3], adds[SB3] = peers.sb3_samples(peer, n), peers.sb3_adds(peer, columns)
        samples[BARE] = peers.bare_transitions(steps, n)
        adds[BARE] = peers.bare_copies({"observation": steps.observations, **steps.fields}, 1)
        check_transitions(samples, n, peers.N_STEP)
        turns = {**{who: peers.turns(adds[who], samples[who]) for who in samples}, **turns}
        targets = [Target(CPPRB, 1.3), Target(TORCHRL, 2), Target(PLAIN, 2), Target(MULTI_STEP), Target(SB3)]
        run.compare(f"append 1, draw {n}, n-step {peers.N_STEP}", turns, [*targets, Target(BARE, at_most=True)])


def simulation(run: Run) -> None:
    """A step of many environments appended to a full buffer, and a large batch."""
    n_envs, n = run.n_envs, run.n_drawn
    steps = run.shared_steps()
    columns = steps.transitions
    with opened(steps.n_bytes, capacity=steps.n_steps) as buffer:
        append = simulated(buffer, columns, n_envs)
        for _ in range(steps.n_steps // n_envs + 1):
            append()
        make_resident(buffer)
        actions: Actions = {OURS: peers.turns(append, partial(buffer.sample, n, TRANSITIONS))}
        if run.has(TORCHRL):
            storage = peers.torchrl_storage(columns)
            rows = storage[:n_envs].clone()
            for who, peer in peers.torchrl_forms(storage).items():
                actions[who] = peers.turns(partial(peer.extend, rows), partial(peer.sample, n))
        copy = peers.bare_copies({"observation": steps.observations, **steps.fields}, n_envs)
        actions[BARE] = peers.turns(copy, peers.bare_transitions(steps, n))
        for who, action in actions.items():
            batch = action()
            shape = (n, peers.STATE)
            peers.assert_shapes(batch, {"observation": shape, "action": (n, peers.ACTION)})
            assert (batch["next"] if who == BARE else batch["next"]["observation"]).shape == shape
        targets = [Target(TORCHRL, 3), Target(PLAIN, 3), Target(BARE, 1.5, at_most=True)]
        run.compare(f"append {n_envs:,}, draw {n:,}", actions, targets)


def simulated(buffer: ReplayBuffer, columns: dict[str, Any], n_envs: int) -> peers.Action:
    """Appends a step of all environments; in each call a few of them end an episode."""
    step = {k: v[:n_envs] for k, v in columns.items() if k not in ("next", "done")}
    final = {"observation": columns["next"][:n_envs]}
    ends = [np.arange(n_envs) % peers.EPISODE == i for i in range(peers.EPISODE)]
    i = 0

    def append() -> None:
        nonlocal i
        i += 1
        buffer.append(step, envs=n_envs, terminated=ends[i % peers.EPISODE], final=final)

    return append


def frames(run: Run, n: int = 16, length: int = 64, n_envs: int = 4) -> None:
    """A step of four environments appended, and sequences of frames for a world model."""
    columns = frame_columns(max(run.n_steps // 25, 4 * FRAME_EPISODE))
    n_steps, windows = len(columns["done"]), Windows(length=length)
    stored = {k: v for k, v in columns.items() if k != "done"}
    n_bytes = sum(v.nbytes for v in stored.values())
    with opened(n_bytes) as buffer:
        for start in range(0, n_steps, FRAME_EPISODE):
            episode = {k: v[start : start + FRAME_EPISODE] for k, v in stored.items()}
            buffer.add_episode(episode, terminated=True)
        make_resident(buffer)
        append = partial(buffer.append, {k: v[:n_envs] for k, v in stored.items()}, envs=n_envs)
        append = peers.every(FRAME_EPISODE, append, partial(append, terminated=np.ones(n_envs, bool)))
        actions: Actions = {OURS: peers.turns(append, partial(buffer.sample, n, windows))}
        if run.has(TORCHRL):
            storage = peers.torchrl_storage(columns)
            rows = storage[:n_envs].clone()
            samples, buffers = peers.torchrl_windows(storage, n, length)
            for who, peer in buffers.items():
                actions[who] = peers.turns(partial(peer.extend, rows), samples[who])
        copy = peers.bare_copies({k: v.copy() for k, v in stored.items()}, n_envs)
        actions[BARE] = peers.turns(copy, peers.bare_windows(stored, n, length))
        check_windows(actions, "image", n, length, FRAME)
        targets = [*(Target(who) for who in (TORCHRL, PLAIN, SEQUENCE)), Target(BARE, 1.3, at_most=True)]
        run.compare(f"append {n_envs}, draw {n} x {length} frames", actions, targets)


def frame_columns(n_steps: int) -> dict[str, Any]:
    """Frames that compress as those of games do; the time of a copy does not depend on what is in them."""
    rng = np.random.default_rng(0)
    image = np.zeros((n_steps, *FRAME), np.uint8)
    image[:, 16:32, 16:32] = rng.integers(0, 255, (n_steps, 1, 1, 3), np.uint8)
    done = np.arange(n_steps) % FRAME_EPISODE == FRAME_EPISODE - 1
    action = rng.standard_normal((n_steps, peers.ACTION), np.float32)
    return {"image": image, "action": action, "reward": rng.standard_normal(n_steps, np.float32), "done": done}


# windows


def check_windows(actions: Actions, name: str, n: int, length: int, shape: tuple[int, ...]) -> None:
    for who, action in actions.items():
        rows = action()[name].reshape(n, length, *shape)  # TorchRL's are flat
        assert rows.shape == (n, length, *shape), who
        if name == "observation" and who in (OURS, TORCHRL, PLAIN):
            peers.assert_follows(rows[:, :-1], rows[:, 1:], who=who)


def windows(run: Run) -> None:
    """Four shapes; the most usual one also with a step appended before each batch."""
    steps = run.shared_steps()
    columns = {"observation": steps.observations[steps.rows], **steps.fields, "done": steps.done}
    stored = {k: v for k, v in columns.items() if k != "done"}
    with filled(steps) as buffer:
        storage = peers.torchrl_storage(columns) if run.has(TORCHRL) else None
        for n, length in SHAPES:
            actions: Actions = {OURS: partial(buffer.sample, n, Windows(length=length))}
            if storage is not None:
                actions |= peers.torchrl_windows(storage, n, length)[0]
            actions[BARE] = peers.bare_windows(stored, n, length)
            check_windows(actions, "observation", n, length, (peers.STATE,))
            run.compare(f"windows {n} x {length}", actions, window_targets((n, length) == SHAPES[0]))
        n, length = SHAPES[0]
        turns: Actions = {
            OURS: peers.turns(appends(buffer, steps), partial(buffer.sample, n, Windows(length=length)))
        }
        if storage is not None:
            samples, buffers = peers.torchrl_windows(storage, n, length)
            for who, peer in buffers.items():
                turns[who] = peers.turns(peers.torchrl_adds(peer, storage[0].clone()), samples[who])
        targets = [Target(TORCHRL, 5), Target(PLAIN, 5), Target(SEQUENCE)]
        run.compare(f"append 1, windows {n} x {length}", turns, targets)


def window_targets(is_usual: bool) -> list[Target]:
    bare = Target(BARE, 1.15 if is_usual else None, at_most=True)
    return [Target(TORCHRL, 5), Target(PLAIN, 5), Target(SEQUENCE), bare]


# what Python costs, and what other threads cost


def python(run: Run) -> None:
    """Batches of one row of four numbers: nothing but the calls."""
    steps = peers.steps_of(min(run.n_steps, 20_000), n_fields=1, width=4)
    with filled(steps, priorities=Priorities()) as buffer, threads(1) as label:
        new = torch.rand(1)

        def turn() -> None:
            buffer.update_priorities(buffer.sample(1, TRANSITIONS)["index"], new)

        ours = {
            "transition": partial(buffer.sample, 1, TRANSITIONS, prioritised=False),
            "window": partial(buffer.sample, 1, Windows(), prioritised=False),
            "prioritised transition": partial(buffer.sample, 1, TRANSITIONS),
            "prioritised transition, update": turn,
        }
        names = {what: f"one {what}, {OURS}, {label}" for what in ours}
        cases = [run.case(names[what], ISOLATES[OURS], action) for what, action in ours.items()]
        for who, action in one_row_peers(run, steps).items():
            cases.append(run.case(f"one transition, {who}, {label}", ISOLATES[who], action))
        run.run_cases(cases)
        for what, name in names.items():
            case = run.report.cases[name]
            fastest = min(case["seconds"]) / case["work"] * 1e6
            target = None if "update" in what else PYTHON_US
            run.report.ratio(f"one {what}, µs", case["per_unit_us"], target, at_most=True, fastest=fastest)
            run.also(f"one {what}, µs", name, None, at_most=True)


def one_row_peers(run: Run, steps: Steps) -> Actions:
    columns, actions = steps.transitions, {}
    if run.has(TORCHRL):
        forms = peers.torchrl_forms(peers.torchrl_storage(columns))
        actions |= {who: partial(buffer.sample, 1) for who, buffer in forms.items()}
    if run.has(CPPRB):
        actions[CPPRB] = peers.cpprb_samples(peers.cpprb_buffer(columns), 1)
    return actions


def beside(run: Run, n_envs: int = 16) -> None:
    """Batches while another thread appends as fast as it can, against alone."""
    steps = run.shared_steps()
    columns = steps.transitions
    with filled(steps) as buffer, threads(1) as label:
        step = {k: v[:n_envs] for k, v in columns.items() if k not in ("next", "done")}
        final = {"observation": columns["next"][:n_envs]}
        append = partial(buffer.append, step, envs=n_envs, final=final)
        append = peers.every(peers.EPISODE, append, partial(append, terminated=np.ones(n_envs, bool)))
        kinds: dict[tuple[str, str], tuple[peers.Action, peers.Action]] = {
            (f"{BATCH} transitions", OURS): (partial(buffer.sample, BATCH, TRANSITIONS), append),
            ("windows 256 x 32", OURS): (partial(buffer.sample, 256, Windows(length=32)), append),
        }
        if run.has(TORCHRL):
            storage = peers.torchrl_storage(columns)
            peer, rows = peers.torchrl_forms(storage)[TORCHRL], storage[:n_envs].clone()
            kinds[f"{BATCH} transitions", TORCHRL] = (partial(peer.sample, BATCH), partial(peer.extend, rows))
        cases = []
        for (what, who), (sample, extend) in kinds.items():
            alone = run.case(f"{what}, {who}, alone, {label}", ISOLATES[who], sample, n_turns=5)
            named = f"{what}, {who}, beside appends, {label}"
            both = run_beside(extend, partial(run.timed, named, sample, alone.work))
            cases += [alone, Case(named, f"{n_envs} environments, no pause", both, alone.work, "batch")]
        run.run_cases(cases)
        for alone, both in zip(cases[::2], cases[1::2], strict=True):
            target = 1.15 if f", {OURS}," in both.name else None
            ratio = f"{both.name}, over alone"
            within(run.report, ratio, both.name, alone.name, target)
            run.also(ratio, both.name, alone.name, at_most=True)


def run_beside(append: peers.Action, timed: Callable[[Path], float]) -> Callable[[Path], float]:
    """The same while a thread appends, which has begun when the time starts."""

    def run(directory: Path) -> float:
        has_begun, is_over = threading.Event(), threading.Event()

        def work() -> None:
            while not is_over.is_set():
                append()
                has_begun.set()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            has_begun.wait(60)
            return timed(directory)
        finally:
            is_over.set()
            thread.join()

    return run


LOOPS: dict[str, Callable[[Run], None]] = {
    "transitions": transitions,
    "fields": fields,
    "quarter": quarter,
    "prioritised": prioritised,
    "dqn": dqn,
    "simulation": simulation,
    "frames": frames,
    "windows": windows,
    "python": python,
    "beside": beside,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=LOOPS, nargs="+", metavar="NAME", help=f"of {', '.join(LOOPS)}")
    parser.add_argument("--steps", type=int, help="that the buffers hold; a million unless given")
    parser.add_argument("--rounds", type=int, help="that every case runs for; 7 unless given")
    parser.add_argument("--threads", type=int, nargs="+", help="of torch; 1 and 2 unless given")


def main() -> None:
    args = arguments(__doc__, add_options)
    small = {"n_steps": 5_000, "rounds": 1, "turn_s": 0.0, "n_envs": 64, "n_drawn": 512}
    options: dict[str, Any] = small if args.small else {"n_steps": 1_000_000, "rounds": 7, "turn_s": 0.02}
    options["threads"] = args.threads or (1, 2)
    given = {"n_steps": args.steps, "rounds": args.rounds}
    report = Report("loops", str(__doc__), args.small)
    run = Run(report, **options | {k: v for k, v in given.items() if v is not None})
    for name in args.only or LOOPS:
        gc.collect()
        gc.freeze()  # what is there now is not collected again before every round
        LOOPS[name](run)
    report.notes.append(
        f"{run.n_steps:,} steps, state of {peers.STATE} numbers, {peers.ACTION} actions, a reward; all resident "
        "except where said; loops that append: buffers full, steps and TensorDicts made before"
    )
    report.notes.append("TorchRL: without n-step returns except where said, and nothing prefetched by anyone")
    report.notes.append(
        f"threads waited up to {run.waited:.0%} of the time for a processor; where it was more than {BUSY:.0%}, "
        "others used the machine ('while busy'), and figures of several threads say little"
    )
    report.notes.append("cache of a quarter: files in the page cache; cold_rows.py has smaller caches and memories")
    report.finish(args.json)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(summary(run, "ms a batch, medians", "per_unit_us"))
    console.print(summary(run, "ms of CPU time of the thread that calls, medians", "cpu_us"))


if __name__ == "__main__":
    main()
