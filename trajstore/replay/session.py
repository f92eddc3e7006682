"""One open session of a buffer: the objects that its parts share, and how they begin and end together."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trajstore.errors import ClosedError, DataError, NotReadyError, RankError
from trajstore.replay.appending import Appending
from trajstore.replay.background_packing import BackgroundPacking, is_packed_by
from trajstore.replay.capture import Capture
from trajstore.replay.checkpoint_schedule import CheckpointOptions, CheckpointSchedule
from trajstore.replay.drawing import Drawing
from trajstore.replay.eviction import Eviction
from trajstore.replay.exit_hooks import ExitHooks
from trajstore.replay.limit_evictor import LimitEvictor
from trajstore.replay.options import ReplayOptions, to_json
from trajstore.replay.policy_versions import PolicyVersions
from trajstore.replay.readiness import Readiness
from trajstore.replay.retention import Retention
from trajstore.replay.session_start import SessionStart
from trajstore.replay.session_state import Counters, as_tensors
from trajstore.replay.statistics import ObservedStatistics
from trajstore.replay.stored_bytes import StoredBytes
from trajstore.replay.turns import TurnTaking
from trajstore.sampling.batches.batch_assembler import BatchAssembler
from trajstore.sampling.reader import Reader
from trajstore.sampling.rng import rank_seed
from trajstore.schema import Schema
from trajstore.store.garbage_collection import GarbageCollector
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store
from trajstore.unclosed import Registration
from trajstore.writing.writer import Writer

_log = logging.getLogger(__name__)


class Session:
    """Everything that belongs to one open buffer. `open_session` makes one; `close` or `release` ends it.

    Locks are taken in this order: ``assembler.lock``, then the writer's. The commit thread takes neither of them.

    Attributes:
        start: How the session began.
        options: What the buffer was made with.
        writer: Appends to the session's own stream.
        reader: Draws and assembles batches.
        stored: Sizes of the stored steps.
        evictor: Applies the limits.
        collector: Frees storage in the background.
        packing: Packs finished streams in the background; None without the option.
        schedule: Takes checkpoints and has them written.
        appending, drawing, eviction, versions, readiness: The parts of the buffer.
        exit_hooks: Take a last checkpoint before the process ends, if the program asked for it.
        registration: Has the session closed if the program does not.
    """

    writer: Writer
    reader: Reader
    stored: StoredBytes
    evictor: LimitEvictor
    collector: GarbageCollector
    schedule: CheckpointSchedule
    appending: Appending
    drawing: Drawing
    eviction: Eviction
    versions: PolicyVersions

    def __init__(self, start: SessionStart) -> None:
        self.start = start
        self.options: ReplayOptions = start.options
        self.store: Store = start.store
        self.storage = start.store.snapshot.storage
        self.group = start.group
        self.pace = start.options.samples_per_insert
        self.turns = TurnTaking()
        self.readiness = Readiness(self.count, self.has_window)
        saved = start.state.get("statistics") if start.state is not None else None
        self.statistics = ObservedStatistics(start.store.schema, start.options.statistics, saved)
        self.is_closed = False
        self.packing: BackgroundPacking | None = None
        self.exit_hooks: ExitHooks | None = None
        self.registration: Registration | None = None
        self._is_closing = False
        self._ending = threading.RLock()
        self._pid = os.getpid()

    # ---- the beginning

    def open(self) -> None:
        """Open the writer and connect all parts; with several ranks, wait until all of them are ready."""
        start, options, group = self.start, self.options, self.group
        self.writer = self.store.writer(
            options.name,
            commit_steps=options.commit_steps,
            commit_seconds=options.commit_seconds,
            buffer_bytes=options.buffer_bytes,
            rank=options.rank,
            world_size=options.world_size,
            world=group.id,
            checkpoint=start.checkpoint,
            dead=start.dead,
        )
        self.writer.leave_to_owner()
        try:
            # Evicted rows stay evicted for readers: of all records, only those of the newest sessions count.
            self.writer.set_view(first_rows=start.first_marks())
            self._connect()
            if group.size > 1:
                self._meet()
            if start.plan is not None:
                _log.info("rank %d of %d:\n%s", group.rank, group.size, start.plan.report)
            self.schedule.start(is_back=start.is_back)
            if options.pack:
                self.packing = self._new_packing()
                self.packing.start()
            if group.is_leader and any(start.first_marks().values()):
                self.collector.request_sweep()  # a session that ended may have left chunks that it had evicted
        except BaseException:
            self._end_threads()
            raise

    def _connect(self) -> None:
        start, options = self.start, self.options
        shown = start.first_shown()
        self.reader = Reader(
            shown,
            device=options.device,
            cache_bytes=options.cache_bytes,
            host_cache_bytes=options.host_cache_bytes,
            seed=rank_seed(options.seed, self.group.rank, self.group.size),
            writer=self.writer,
            priorities=options.priorities,
            as_tensordict=options.as_tensordict,
            compiled=options.compiled,
            streams=start.state["order"]["streams"] if start.state else (),
        )
        self.stored = StoredBytes(self.storage, self.writer)
        self.evictor = LimitEvictor(self.reader.assembler, Retention.of(options.capacity), self.stored)
        self._connect_parts()
        if start.state is not None:
            self._restore(start.state)
        self._measure(shown)
        self.evictor.follow(shown)
        if options.statistics:
            self.writer.set_commit_observer(self.statistics.update)
        self.reader.assembler.published = self.eviction.apply_limits
        if (start.checkpoint is not None or start.is_back) and self.store.schema is not None:
            self.writer.publish_view()  # from now on, what this session wants of older streams counts

    def _connect_parts(self) -> None:
        start, options, assembler = self.start, self.options, self.reader.assembler
        iterators = start.state["iterators"] if start.state is not None else ()
        self.appending = Appending(assembler, self.pace, self.turns, self.readiness)
        self.drawing = Drawing(self.reader, self.pace, self.turns, self.refresh, iterators)
        self.versions = PolicyVersions(self.reader)
        self.collector = GarbageCollector.of_store(self.storage, self.writer, grace_s=options.grace_s)
        is_shared = self.group.size > 1 and options.share == "whole"  # others may evict steps that are shown here
        capture = Capture(
            assembler,
            self.writer,
            self.turns,
            self.state,
            self.statistics.state_dict,
            self.follow_others if is_shared else None,
        )
        self.schedule = CheckpointSchedule(
            self.storage,
            self.group,
            start.checkpoint.id if start.checkpoint is not None else None,
            self.collector.check_pins,
            self.writer.wait,
            self.collector.request_sweep,
            capture.take,
            CheckpointOptions(options.attend_s, options.checkpoint_seconds, options.keep_checkpoints),
        )
        first_rows = {record.id: record.first_row for record in self.store.snapshot.streams}
        self.eviction = Eviction(
            self.evictor,
            self.reader,
            self.writer,
            self.collector,
            lambda: self.schedule.held,
            start.shown_by_checkpoint,
            first_rows,
        )

    def _new_packing(self) -> BackgroundPacking:
        start, rank, size = self.start, self.group.rank, self.group.size

        def chosen(stored: Snapshot) -> list[str]:
            records = start.shown_of(stored).streams
            return [r.id for r in records if is_packed_by(r, rank, size) and r.id != self.writer.stream]

        return BackgroundPacking(self.storage, lambda: self.schema, chosen, self.collector.request_sweep)

    def _meet(self) -> None:
        """Publish what this rank wants of older streams before any rank continues: what no rank wants is freed."""
        if self.store.schema is not None:
            self.writer.wait(self.writer.publish_view())
        if not self.start.is_back:
            self.group.gather("ready", True)
        if self.start.checkpoint is not None:
            with self.reader.assembler.lock:
                self.eviction.publish_marks()  # from here on, other ranks decide about the episodes they received

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the state of a checkpoint."""
        counters = Counters.from_tree(state["counters"])
        if counters.policy_version is not None:
            self.versions.restore(counters.policy_version)
        assembler = self.reader.assembler
        with assembler.lock:
            assembler.arrange(state["order"], growing=self.start.growing)
            self.evictor.load_state_dict(state["retention"], self.start.known_spans)
            self.reader.load_state_dict(as_tensors(state["reader"]))
        self.drawing.n_sampled, self.drawing.n_redrawn = counters.sampled, counters.redrawn
        if self.pace is not None and state["limiter"] is not None:
            self.pace.load_state_dict(state["limiter"])

    def register(self, face: object) -> None:
        """Have the session closed when the buffer that the program holds is dropped, or when the process ends."""
        name = f"{type(face).__name__} at {self.store.url}"
        self.registration = Registration(face, self.close, self.flush, name)

    # ---- while it is open

    @property
    def schema(self) -> Schema | None:
        return self.writer.schema or self.store.schema

    @contextlib.contextmanager
    def up_to_date(self, *, waits: bool = False) -> Iterator[BatchAssembler]:
        """Check the session, and hold the assembler's lock with all appended steps shown.

        Args:
            waits: Whether to wait while another thread appends; else its last steps may be missing.
        """
        self.check()
        assembler = self.reader.assembler
        with assembler.lock:
            assembler.publish(waits=waits)
            yield assembler

    def count(self) -> tuple[int, int]:
        """The number of steps and of episodes that can be sampled."""
        with self.up_to_date() as assembler:
            return assembler.index.n_steps, assembler.index.n_episodes

    def has_window(self) -> bool:
        """Whether a window of the buffer's own kind exists; True as well if `sample` will tell that none can."""
        with self.up_to_date() as assembler:
            try:
                return assembler.kind(self.options.sample).starts.total > 0
            except NotReadyError:
                return False
            except DataError:
                return True

    def refresh(self) -> None:
        self.check()
        self.follow_others()

    def follow_others(self) -> None:
        """Show what other sessions have committed since; the cost is proportional to the new data."""
        self.store.refresh()
        assembler, fresh = self.reader.assembler, self.start.shown()
        self._measure(fresh)
        with assembler.lock:
            fresh = self.start.shown()
            assembler.follow(fresh)
            self.evictor.follow(fresh)

    def _measure(self, shown: Snapshot) -> None:
        """Measure the objects of other streams if a limit counts bytes. Waits for the storage, without a lock."""
        if self.evictor.options.bytes is not None:
            self.stored.measure(shown)

    def step_bytes(self) -> int | None:
        """Bytes of the committed steps that are shown; None if streams of other sessions were not measured.

        Called with the assembler's lock held.
        """
        assembler = self.reader.assembler
        return int(self.stored.of(assembler.index).total) if self.stored.knows(assembler.snapshot) else None

    def state(self) -> dict[str, Any]:
        """Everything in memory that a resume needs; called with the assembler's and the writer's lock held."""
        iterators = self.drawing.iterator_states()  # first: this takes back what was prefetched
        counters = Counters(
            self.drawing.n_sampled,
            self.drawing.n_redrawn,
            self.versions.current,
        )
        return {
            "options": to_json(self.options),
            "order": self.reader.assembler.order(),
            "reader": self.reader.state_dict(),
            "retention": self.evictor.state_dict(),
            "iterators": iterators,
            "limiter": self.pace.state_dict() if self.pace is not None else None,
            "counters": counters.to_tree(),
        }

    def flush(self) -> None:
        """Make appended, written-back and evicted steps durable, and wait for checkpoints being written."""
        self.check()
        self.writer.commit()
        self.save_values()
        self.eviction.hide_removed()
        self.schedule.wait()

    def save_values(self) -> None:
        """Store changed priorities and column values of committed steps."""
        reader = self.reader
        if reader.priority_sampler is None and not reader.has_columns:
            return
        with reader.assembler.lock:
            reader.assembler.publish()  # committed rows have their values stored by row
            n = reader.save_values(self.writer)
        if n:
            self.writer.commit()

    def check_process(self) -> None:
        """Refuse a call in another process. Comes before any lock: a forked child may find it held for ever."""
        if self._pid != os.getpid():
            raise ClosedError(
                f"the buffer at {self.store.url} belongs to process {self._pid}; open one in this process"
            )

    def check_open(self) -> None:
        self.check_process()
        if self.is_closed:
            raise ClosedError(f"the buffer at {self.store.url} is closed")

    def check(self) -> None:
        """Refuse a call on a closed buffer, and raise what failed in the background."""
        if self.is_closed or self._pid != os.getpid():
            self.check_open()
        self.schedule.raise_pending()
        if self.packing is not None:
            self.packing.raise_pending()
        self.collector.raise_pending()
        self.writer.raise_pending()

    # ---- the end

    @property
    def is_ending(self) -> bool:
        return self.is_closed or self._is_closing

    def close(self) -> None:
        """Commit, end open episodes as cut, wait for checkpoints, free memory; callable again after an error."""
        self.check_process()
        with self._ending:
            if not self.is_closed:
                self._close()

    def _close(self) -> None:
        if not self.writer.is_closed:
            with contextlib.suppress(
                ClosedError
            ):  # after a `close` that failed, or an interrupt: only `close` commits
                self.writer.commit()
            self._apply_limits_last()
            self._save_last_values()
        self._is_closing = self.eviction.is_closing = True
        errors = [e for part in self._background_parts() if (e := failure_of(part.close))]
        self.eviction.write_final_marks()
        self._stop_following()
        self.writer.close()
        self.is_closed = True
        errors += [e for e in (failure_of(self.group.leave),) if e]
        self._leave_process()
        self._free()
        if errors:
            raise errors[0]

    def _apply_limits_last(self) -> None:
        assembler = self.reader.assembler
        with assembler.lock:
            assembler.publish()

    def _stop_following(self) -> None:
        """Let batches that are still drawn show the episodes as they are: the writer ends open ones as cut."""
        with self.reader.assembler.lock:
            self.reader.assembler.stop_following()

    def _save_last_values(self) -> None:
        try:
            self.save_values()
        except ValueError:  # as above: without a cache, nothing was sampled, and no value can have changed
            if self.reader.assembler.has_cache:
                raise

    def release(self) -> None:
        """End all threads; steps that are not durable are lost."""
        self.is_closed = self._is_closing = self.eviction.is_closing = True
        if self.pace is not None:
            self.pace.close()
        self.schedule.cancel()
        self._stop_following()
        self._end_threads()
        failure_of(self.group.leave)
        self.writer.release()
        self._leave_process()
        self._free()

    def _leave_process(self) -> None:
        """Undo what would be done at the end of the process."""
        registration, self.registration = self.registration, None
        if registration is not None:
            registration.end()
        if self.exit_hooks is not None:
            self.exit_hooks.remove()

    def _free(self) -> None:
        if self.pace is not None:
            self.pace.close()
        with self.reader.assembler.lock:
            self.reader.assembler.close()

    def _end_threads(self) -> None:
        """End the threads that have been started so far; failures do not matter any more."""
        for part in self._background_parts():
            failure_of(part.close)
        failure_of(self.writer.discard)

    def _background_parts(self) -> Iterator[CheckpointSchedule | BackgroundPacking | GarbageCollector]:
        """Those that have been made so far, in the order in which they end."""
        for name in ("schedule", "packing", "collector"):
            if part := getattr(self, name, None):
                yield part


def open_session(start: SessionStart) -> Session:
    """Open a session; if that fails, the other ranks learn that they need not wait for this one."""
    session = Session(start)
    try:
        session.open()
    except BaseException as failure:
        start.group.is_closing.set()
        if not isinstance(failure, RankError):
            failure_of(start.group.leave)
        raise
    return session


def failure_of(call: Callable[[], None]) -> Exception | None:
    """Make a call; returns the exception that it raised."""
    try:
        call()
    except Exception as failure:
        return failure
    return None
