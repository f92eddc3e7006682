"""Which step of the store is at which position of which environment."""

from __future__ import annotations

import numpy as np

from trajstore.compat.alf.ring_table import RingTable
from trajstore.compat.alf.ring_windows import WindowParts, WindowStarts
from trajstore.compat.alf.stored_steps import StoredSteps
from trajstore.sampling.index.index_entries import GONE
from trajstore.schema import Array

# Columns of the table of episodes. A step's t is its position minus the shift of its episode.
_ENV, _STREAM, _EPISODE, _SHIFT, _BEGIN, _LAST, _STRETCH = range(7)
# Columns of the table of stretches.
_STRETCH_ENV, _STRETCH_FIRST, _STRETCH_STOP = range(3)


class EnvironmentRings:
    """One ring of steps per environment; each step has a position, which only increases.

    A *stretch* is a range of positions of one environment whose steps followed each other without a break. Windows
    lie within one stretch. An episode that ended with LAST and the next one, which begins with FIRST, are in the
    same stretch. Where the recording broke off, a stretch ends.

    Attributes:
        length: Steps that each ring keeps.
        stop: For each environment, the position of its next step.
        first: For each environment, the position of the oldest step that its ring keeps.
        n_dropped: Steps that rings dropped since the last `take_dropped`; the store may still hold them.
    """

    def __init__(self, n_envs: int, length: int, first: int = 0) -> None:
        self.length = length
        self.stop, self.first = np.full((2, n_envs), first)
        self._episode_at = np.full((n_envs, length), -1)  # by environment and index in the ring
        self._episodes, self._stretches = RingTable(7), RingTable(3)
        self._open = np.full(n_envs, -1)  # id of each environment's open episode
        self._stretch = np.full(n_envs, -1)  # id of each environment's newest stretch
        self._stretch_order: Array | None = None  # ids by environment and position; None: to be sorted again
        self._has_ended = np.zeros(n_envs, bool)  # the newest step is a LAST
        self.n_dropped = 0

    def __len__(self) -> int:
        return len(self.stop)

    @property
    def sizes(self) -> Array:
        """The number of steps in each ring."""
        sizes: Array = self.stop - self.first
        return sizes

    def is_open(self, env: Array) -> Array:
        """Return whether environments have an open episode."""
        open_: Array = self._open[env] >= 0
        return open_

    def add(self, env: Array, stream: int, handles: tuple[Array, Array], is_first: Array, is_last: Array) -> None:
        """Add one step to each of some rings; ``handles`` are the episodes and t of the steps in the stream."""
        (episode, t), position = handles, self.stop[env]
        begins = is_first | (self._open[env] < 0)
        if begins.any():
            is_broken = begins & ~(is_first & self._has_ended[env])
            broken = env[is_broken]
            self._stretch[broken] = self._stretches.add(broken, position[is_broken], position[is_broken])
            self._stretch_order = None
            new, at = env[begins], position[begins]
            columns = (episode[begins], at - t[begins], at, at, self._stretch[new])
            self._open[new] = self._episodes.add(new, np.full(len(new), stream), *columns)
        owner = self._open[env]
        self._episodes.data[owner, _LAST] = position
        self._stretches.data[self._stretch[env], _STRETCH_STOP] = position + 1
        self._episode_at[env, position % self.length] = owner
        self._has_ended[env] = is_last
        self._open[env[is_last]] = -1
        self._advance(env, position + 1)

    def _advance(self, env: Array, stop: Array) -> None:
        first = np.maximum(self.first[env], stop - self.length)
        self.n_dropped += int((first - self.first[env]).sum())
        self.stop[env], self.first[env] = stop, first

    def end_episode(self, env: int) -> None:
        """Record that an environment's episode is over without a LAST; the next step begins another episode."""
        self._open[env] = -1

    def clear(self, env: Array) -> None:
        """Drop all steps of some environments; their positions continue."""
        self.n_dropped += int(self.sizes[env].sum())
        self.first[env] = self.stop[env]

    def drop_oldest(self, env: Array, n: int) -> None:
        """Drop the ``n`` oldest steps of each of some environments, which hold at least that many."""
        self.n_dropped += n * len(env)
        self.first[env] += n

    # ---- finding steps

    def has(self, env: Array, position: Array) -> Array:
        """Return whether rings hold steps at positions."""
        found: Array = (position >= self.first[env]) & (position < self.stop[env])
        return found

    def handles(self, env: Array, position: Array) -> Array:
        """Return stream, episode and t of held steps, ``[..., 3]``."""
        episode = self._episodes_of(env, position)
        return np.stack([episode[..., _STREAM], episode[..., _EPISODE], position - episode[..., _SHIFT]], -1)

    def episode_begins(self, env: Array, position: Array) -> Array:
        """Return the positions at which the episodes of held steps began; those first steps may be dropped."""
        begin: Array = self._episodes_of(env, position)[..., _BEGIN]
        return begin

    def episode_ends(self, env: Array, position: Array) -> Array:
        """Return the positions of the newest steps of the episodes of held steps."""
        end: Array = self._episodes_of(env, position)[..., _LAST]
        return end

    def _episodes_of(self, env: Array, position: Array) -> Array:
        episodes: Array = self._episodes.data[self._episode_at[env, position % self.length]]
        return episodes

    # ---- windows

    def window_starts(self, length: int, low: Array) -> WindowStarts:
        """Return all starts of windows of ``length`` steps, from the position ``low`` of each environment.

        The starts are in order of environment and position. So their order does not depend on when each environment
        was stepped, and it is the same after resuming.
        """
        if self._stretch_order is None:
            self._stretch_order = np.argsort(self._stretches.data[:, _STRETCH_ENV], kind="stable")
        env, first, stop = self._stretches.data[self._stretch_order].T
        first = np.maximum(first, low[env])
        return WindowStarts(env, first, np.cumsum((stop - length + 1 - first).clip(0)))

    def is_window_start(self, env: Array, position: Array, length: int) -> Array:
        """Return whether windows of ``length`` steps may start at held steps."""
        stretch = self._episodes_of(env, position)[..., _STRETCH]
        found: Array = position + length <= self._stretches.data[stretch, _STRETCH_STOP]
        return found

    def window_parts(self, env: Array, position: Array, length: int) -> WindowParts:
        """Return windows of ``length`` steps, divided into parts that lie in one episode each."""
        window, start, found = np.arange(len(env)), np.zeros(len(env), np.int64), []
        while len(window):
            stop = start + self.episode_ends(env, position) + 1 - position
            found.append((window, start, np.minimum(stop, length), env, position))
            continues = stop < length
            position = (position + stop - start)[continues]
            window, start, env = window[continues], stop[continues], env[continues]
        return WindowParts(*map(np.concatenate, zip(*found, strict=True)))

    # ---- dropped steps

    def take_dropped(self) -> tuple[Array, Array, Array]:
        """Return which steps the store may evict, and forget the episodes that have no steps left.

        Returns:
            Stream, episode and first remaining t of every episode that lost steps; t is `GONE` if none remain.
        """
        episodes, stretches = self._episodes.data, self._stretches.data
        low, is_open = self.first[episodes[:, _ENV]], np.zeros(len(episodes), bool)
        is_open[self._open[self._open >= 0]] = True
        is_gone = (episodes[:, _LAST] < low) & ~is_open
        lost = episodes[episodes[:, _BEGIN] < low]
        first_t = np.where(is_gone, GONE, low - episodes[:, _SHIFT])[episodes[:, _BEGIN] < low]
        is_used = stretches[:, _STRETCH_STOP] > self.first[stretches[:, _STRETCH_ENV]]
        is_used[episodes[~is_gone, _STRETCH]] = True
        is_used[self._stretch[self._stretch >= 0]] = True
        new_episode, new_stretch = self._episodes.keep(~is_gone), self._stretches.keep(is_used)
        self._episode_at, self._open = new_episode[self._episode_at], new_episode[self._open]
        self._stretch, self._stretch_order = new_stretch[self._stretch], None
        self._episodes.data[:, _STRETCH] = new_stretch[self._episodes.data[:, _STRETCH]]
        self.n_dropped = 0
        return lost[:, _STREAM], lost[:, _EPISODE], first_t

    # ---- steps of earlier sessions

    @classmethod
    def from_steps(cls, n_envs: int, length: int, steps: StoredSteps, unused: int) -> EnvironmentRings:
        """Return rings that hold the steps of a store; empty rings begin at the position ``unused``."""
        rings = cls(n_envs, length, unused)
        for env in np.unique(steps.env).tolist():
            at = np.flatnonzero(steps.env == env)
            rings._fill(env, steps.take(at[np.argsort(steps.position[at])]))
        return rings

    def _fill(self, env: int, steps: StoredSteps) -> None:
        """Fill one ring with steps that have consecutive positions."""
        position, stop = steps.position, int(steps.position[-1]) + 1
        begins = np.append(True, (np.diff(steps.stream) != 0) | (np.diff(steps.episode) != 0))
        is_broken = begins & ~(steps.is_first & np.append(False, steps.is_last[:-1]))
        stops = np.append(position[:-1][begins[1:]], position[-1])
        breaks = np.append(position[:-1][is_broken[1:]], position[-1]) + 1
        stretch = self._stretches.add(np.full(len(breaks), env), position[is_broken], breaks)
        stretch_of_episode = stretch[np.cumsum(is_broken) - 1][begins]
        shift = position - steps.t
        # After a redistribution, the positions before an episode without its first steps belong to other episodes.
        begin = np.where(position == steps.recorded, shift, position)
        columns = (column[begins] for column in (steps.stream, steps.episode, shift, begin))
        owner = self._episodes.add(steps.env[begins], *columns, stops, stretch_of_episode)[np.cumsum(begins) - 1]
        kept = position >= stop - self.length
        self._episode_at[env, position[kept] % self.length] = owner[kept]
        self._has_ended[env], self._stretch[env] = steps.is_last[-1], stretch[-1]
        self.stop[env], self.first[env] = stop, max(int(position[0]), stop - self.length)
        self.n_dropped += int((~kept).sum())
