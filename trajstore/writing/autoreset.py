"""Vector environments that reset themselves: which of the steps that they return belong to no episode.

In Gymnasium's mode ``NEXT_STEP``, the step after an end resets the environment: it ignores the action, has the
reward 0, and its observation is the final one of the episode that ended. Such a step is not stored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

import numpy as np

from trajstore.errors import DataError
from trajstore.schema import Array

_log = logging.getLogger(__name__)

Autoreset = Literal["next_step", "same_step", "disabled"]
_MODES = {"nextstep": "next_step", "samestep": "same_step", "disabled": "disabled"}
_ENOUGH = 3  # ends after which the next observation of the environment was always the final one


def as_envs(envs: Any, autoreset: Any = None) -> tuple[Iterable[int], Autoreset | None]:
    """The numbers of several environments, and when they reset themselves (None: not known).

    Args:
        envs: Numbers, how many there are, or a vector environment, whose metadata says when it resets.
        autoreset: When they reset themselves; counts more than what a vector environment says.

    Raises:
        DataError: A vector environment does not say when it resets, or ``autoreset`` is no such mode.
    """
    if type(envs) is range and autoreset is None:  # the common case
        return envs, None
    mode = None if autoreset is None else _mode(autoreset)
    if isinstance(envs, (int, np.integer)) and not isinstance(envs, bool):
        if envs < 1:
            raise DataError(f"envs: expected at least 1 environment, got {envs}")
        return range(int(envs)), mode
    n = getattr(envs, "num_envs", None)
    if not isinstance(n, (int, np.integer)):
        return envs, mode
    if mode is None:
        given = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
        if given is None:
            raise DataError(
                "envs: the vector environment has no metadata['autoreset_mode'], so it is not known when it resets;"
                " pass autoreset='next_step', 'same_step' or 'disabled'"
            )
        mode = _mode(given)
    return range(int(n)), mode


def _mode(value: Any) -> Autoreset:
    """A mode given as text, or as one of gymnasium's ``AutoresetMode``."""
    text = getattr(value, "value", value)
    key = text.replace("_", "").lower() if isinstance(text, str) else ""
    if key not in _MODES:
        raise DataError(f"autoreset: expected 'next_step', 'same_step' or 'disabled', got {value!r:.80}")
    return cast(Autoreset, _MODES[key])


class FinalObservations:
    """The final values of episodes that ended last, compared with the values that come next.

    A caller who does not say that the environments reset themselves stores their reset steps as data. This can be
    seen: the next step of the environment has the final observation again. The same is seen if the caller passes,
    as the final observation, the first one of the next episode. Ends at which the observation does not change are
    not counted. One end after which another observation comes shows that the caller is right.
    """

    def __init__(self) -> None:
        self._env = np.empty(0, np.int64)
        self._finals: dict[str, Array] = {}
        self._is_moved = np.empty(0, bool)
        self._n_same = 0
        self._is_settled = False
        self._has_warned = False

    def __bool__(self) -> bool:
        """Whether the next values are to be compared with final ones."""
        return bool(self._finals)

    def warn_if_unknown(self, ends: Array, finals: object, mode: Autoreset | None) -> None:
        """Log, once, that reset steps can't be recognised: no mode and no final values are given."""
        if mode is None and finals is None and not self._has_warned and ends.any():
            self._has_warned = True
            _log.warning(
                "environments end episodes, and append does not know when they reset themselves: if they do so in"
                " the step after an end (Gymnasium's default), that step is stored as data. Pass envs=envs, the"
                " vector environment itself, or autoreset='next_step', 'same_step' or 'disabled'"
            )

    def forget(self) -> None:
        """Forget what ended last: the caller has reset the environments."""
        self._finals = {}

    def remember(self, env: Array, rows: Mapping[str, Array], finals: Mapping[str, Array], where: Array) -> None:
        """Keep the final values of the environments at the positions ``where``, whose episodes end."""
        self._env = env[where]
        self._finals = {path: value[where] for path, value in finals.items()}  # a copy
        self._is_moved = ~self._equal(rows, where)

    def _equal(self, rows: Mapping[str, Array], where: Array) -> Array:
        """Of each remembered environment, whether its values at these positions of ``rows`` are the final ones."""
        same = np.ones(len(where), bool)
        for path, final in self._finals.items():
            values = rows[path][where]
            equal = (values == final) | ((values != values) & (final != final))  # NaN is like NaN
            same &= equal.reshape(len(where), -1).all(1)
        return same

    def check(self, env: Array, rows: Mapping[str, Array], resetting: Array | None, mode: Autoreset | None) -> None:
        """Compare a step of several environments with the final values of those that ended before it.

        Args:
            env: The environments.
            rows: Their values by field.
            resetting: Which of them only reset themselves; None: none of them.
            mode: When the environments reset themselves, as far as the caller says.

        Raises:
            DataError: The values show that the caller is mistaken about resets.
        """
        if not self._finals or mode == "disabled" or (self._is_settled and resetting is None):
            return
        common, position, known = np.intersect1d(env, self._env, assume_unique=True, return_indices=True)
        if len(common):
            self._env, self._is_moved = self._env[known], self._is_moved[known]
            self._finals = {path: value[known] for path, value in self._finals.items()}
            same = self._equal(rows, position)
            if mode == "next_step":
                self._check_resetting(common, same, resetting[position] if resetting is not None else None)
            else:
                self._count(common, same)
        self.forget()

    def _check_resetting(self, env: Array, same: Array, resetting: Array | None) -> None:
        wrong = resetting & ~same if resetting is not None else np.zeros(len(env), bool)
        if wrong.any():
            raise DataError(
                f"env {env[wrong][0]}: its episode has ended, so with autoreset='next_step' this step resets it and"
                " its observation is the final one of that episode, but it is another; if you have reset the"
                " environments yourself, call cut_episodes() before you append their first step"
            )

    def _count(self, env: Array, same: Array) -> None:
        counted = same[self._is_moved]
        self._is_settled = self._is_settled or not counted.all()
        self._n_same += int(counted.sum())
        if not self._is_settled and self._n_same >= _ENOUGH:
            raise DataError(
                f"env {env[self._is_moved][0]}: after each of {self._n_same} ends, the next step has the final"
                " observation of the episode that ended. If these are steps in which environments reset themselves"
                " (Gymnasium's default), pass envs=envs, the vector environment itself, or autoreset='next_step',"
                " and they are left out. If the environments reset within the step that ends, take the final"
                " observations from infos['final_obs'] (trajstore.compat.gymnasium.final_observations). If the"
                " episodes do continue where the last one ended, pass autoreset='disabled'"
            )
