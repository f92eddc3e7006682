"""The methods of ALF's replay buffer that find and return steps, without changing anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trajstore.compat.alf.batch_info import BatchInfo
from trajstore.compat.alf.default_device import to_default_device
from trajstore.compat.alf.environment_rings import EnvironmentRings
from trajstore.compat.alf.process_link import OwnerLock
from trajstore.compat.alf.step_reader import StepReader, to_tensors
from trajstore.compat.alf.window_draws import DrawOptions
from trajstore.errors import NotReadyError
from trajstore.schema import Array


class StepQueries:
    """Finds steps by environment and position; `trajstore.compat.alf.ReplayBuffer` sets the attributes."""

    _lock: OwnerLock
    _rings: EnvironmentRings
    _reader: StepReader | None
    _draw_options: DrawOptions
    _own_options: dict[str, Any]

    @property
    def _steps(self) -> StepReader:
        if self._reader is None:
            raise NotReadyError("the buffer is empty: add experience first, or give a data_spec")
        return self._reader

    def steps_to_episode_end(self, pos: Any, env_ids: Any) -> torch.Tensor:
        """Return how many steps of the same episode follow each step, as far as it has been recorded."""
        with self._lock:
            env, position = self._checked_steps(env_ids, pos)
            return to_tensors(self.device, self._rings.episode_ends(env, position) - position)[0]

    def get_episode_begin_position(self, pos: Any, env_ids: Any) -> torch.Tensor:
        """Return the positions at which the episodes of steps began; those first steps may be dropped."""
        with self._lock:
            env, position = self._checked_steps(env_ids, pos)
            return to_tensors(self.device, self._rings.episode_begins(env, position))[0]

    def get_earliest_position(self, env_ids: Any) -> torch.Tensor:
        """Return the position of the oldest step of each of some environments."""
        with self._lock:
            return to_tensors(self.device, self._rings.first[torch.as_tensor(env_ids).cpu().numpy()])[0]

    def get_current_position(self) -> torch.Tensor:
        """Return the position of each environment's next step."""
        with self._lock:
            return to_tensors(self.device, self._rings.stop.copy())[0]

    def get_field(self, field_name: Any, env_ids: Any, positions: Any) -> Any:
        """Return fields of steps, by a name with dots (``"observation.achieved_goal"``) or a nest of such names.

        Raises:
            IndexError: A step is not in the buffer.
            KeyError: A field does not exist.
        """
        with self._lock:
            env, position = self._checked_steps(env_ids, positions)
            found = self._steps.named_fields(field_name, env, position)
        return to_default_device(found)

    def gather_all(
        self, ignore_earliest_frames: bool = False, convert_to_default_device: bool = True
    ) -> tuple[Any, BatchInfo]:
        """Return all steps, oldest first: ``[num_environments, T, ...]``; T is the size of the fullest environment.

        Environments with fewer steps are padded with zeros; ``valid`` of the info says which steps exist.

        Args:
            ignore_earliest_frames: Leave out ``num_earliest_frames_ignored`` of the oldest steps.
            convert_to_default_device: If torch has another default device than the CPU, return the steps there.
        """
        with self._lock:
            low = self._rings.first + (self._draw_options.n_ignored if ignore_earliest_frames else 0)
            position = low[:, None] + np.arange(max(0, int((self._rings.stop - low).max())))
            env = np.repeat(np.arange(len(low))[:, None], position.shape[1], 1)
            valid = self._rings.has(env, position)
            if not valid.any():
                raise NotReadyError("the buffer is empty: add experience first")
            values = self._steps.values(env[valid], position[valid])
            env_ids, positions, mask = to_tensors(self.device, np.arange(len(low)), low, valid)
            whole = {path: value.new_zeros((*mask.shape, *value.shape[1:])) for path, value in values.items()}
            for path, value in values.items():
                whole[path][mask] = value
            batch = self._steps.nested(whole)
        if convert_to_default_device:
            batch, env_ids, positions, mask = to_default_device((batch, env_ids, positions, mask))
        return batch, BatchInfo(env_ids, positions, replay_buffer=self, valid=mask)

    @property
    def total_size(self) -> torch.Tensor:
        """The number of steps of all environments together."""
        with self._lock:
            n = int(self._rings.sizes.sum())
        return torch.tensor(n)

    @property
    def current_size(self) -> torch.Tensor:
        """The number of steps of each environment."""
        with self._lock:
            return to_tensors(self.device, self._rings.sizes)[0]

    @property
    def num_environments(self) -> int:
        return len(self._rings)

    @property
    def max_length(self) -> int:
        """Steps to keep per environment; after resuming with fewer ranks it may be larger than requested."""
        return self._rings.length

    @property
    def device(self) -> str:
        return str(self._own_options["device"])

    def _checked_steps(self, env_ids: Any, positions: Any, *, must_exist: bool = True) -> tuple[Array, Array]:
        """Return environments and positions as arrays of one shape.

        Raises:
            IndexError: An environment does not exist or, with ``must_exist``, a step does not.
        """
        env, position = np.broadcast_arrays(*(np.asarray(torch.as_tensor(a).cpu()) for a in (env_ids, positions)))
        env, position = env.astype(np.int64), position.astype(np.int64)
        is_env = (env >= 0) & (env < len(self._rings))
        exists = is_env if not must_exist else is_env & self._rings.has(np.where(is_env, env, 0), position)
        if not exists.all():
            bad = int(np.flatnonzero(~exists)[0])
            number, at = int(env.flat[bad]), int(position.flat[bad])
            held = f"{self._rings.first[number]} to {self._rings.stop[number] - 1}" if is_env.flat[bad] else "none"
            raise IndexError(f"env {number}, position {at}: no such step; that environment has {held}")
        return env, position
