"""Checks, encodes and appends trajectories to a `trajstore.ReplayBuffer`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from trajstore.arguments import parse_bytes
from trajstore.compat.rlinf.directory_index import check_weights_id
from trajstore.compat.rlinf.trajectory import Trajectory, get_model_weights_id
from trajstore.compat.rlinf.trajectory_encoding import EncodedTrajectory, encode
from trajstore.compat.rlinf.trajectory_ledger import LedgerEntry
from trajstore.errors import ClosedError, DataError
from trajstore.format.handles import EpisodeKey
from trajstore.replay.buffer import ReplayBuffer
from trajstore.schema import Schema, nest
from trajstore.writing.staging import staged_rows


def encode_all(trajectories: Sequence[Trajectory], schema: Schema | None) -> list[EncodedTrajectory]:
    """Encode trajectories, and check that all have the same schema.

    Args:
        trajectories: The trajectories.
        schema: The schema that they must have; None: that of the first one.

    Raises:
        DataError: A trajectory has another schema, or its ``model_weights_id`` cannot be part of a file name.
    """
    encoded = [encode(trajectory) for trajectory in trajectories]
    for number, item in enumerate(encoded):
        own = item.schema
        schema = schema or own
        if differences := schema.differences(own, "earlier ones", "this one"):
            raise DataError(f"trajectory {number} does not match earlier ones: {'; '.join(differences)}")
        check_weights_id(item.metadata["model_weights_id"], f"trajectory {number}")
        if not item.metadata["model_weights_id"]:
            item.metadata["model_weights_id"] = get_model_weights_id(trajectories[number].versions)
    return encoded


def append_trajectory(memory: ReplayBuffer, encoded: EncodedTrajectory, number: int, serial: int) -> LedgerEntry:
    """Append a trajectory; if that fails, evict the part that was appended.

    Args:
        memory: The buffer.
        encoded: The trajectory.
        number: Its number.
        serial: A number that no other trajectory of the store has.
    """
    n_steps, n_envs = encoded.ends.shape
    n_rows = staged_rows(parse_bytes(memory.options.buffer_bytes, "buffer_bytes"), encoded.schema.row_bytes)
    episodes: list[int] = []
    try:
        for block in encoded.blocks(n_rows):
            handles = memory.extend(
                nest(block.steps),
                terminated=block.is_terminal.numpy(),
                truncated=block.ends.numpy(),
                final=nest(block.final) or None,
                metadata={"trajectory": number, "serial": serial, **block.metadata},
            )
            episodes += [int(handles.episode.min()), int(handles.episode.max())]
    except BaseException:
        if episodes:
            appended = range(min(episodes), max(episodes) + 1)
            with contextlib.suppress(ClosedError):
                memory.evict(keys=[EpisodeKey(memory.stream, episode) for episode in appended])
        raise
    first, last = min(episodes), max(episodes)
    return LedgerEntry(number, memory.stream, first, last - first + 1, n_steps * n_envs)
