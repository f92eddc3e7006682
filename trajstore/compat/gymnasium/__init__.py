"""Records the episodes of Gymnasium environments.

recorder             `Recorder` and `VectorRecorder`: wrappers that record each step
episode_recording    the calls to the writer, in order, with retries
recorded_fields      which fields the spaces of an environment become
field_values         observations, actions and infos as values of those fields
final_observations   last observations of environments that reset within the step, for loops without a recorder
"""

from trajstore.compat.gymnasium.final_observations import final_observations
from trajstore.compat.gymnasium.recorder import FieldOptions, Recorder, VectorRecorder, schema_of

__all__ = ["FieldOptions", "Recorder", "VectorRecorder", "final_observations", "schema_of"]


def __dir__() -> list[str]:
    return sorted(__all__)
