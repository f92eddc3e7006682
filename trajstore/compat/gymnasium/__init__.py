"""Records the episodes of Gymnasium environments.

recorder            `Recorder` and `VectorRecorder`: wrappers that record each step
episode_recording   the calls to the writer, in order, with retries
recorded_fields     which fields the spaces of an environment become
field_values        observations, actions and infos as values of those fields
"""

from trajstore.compat.gymnasium.recorder import FieldOptions, Recorder, VectorRecorder, schema_of

__all__ = ["FieldOptions", "Recorder", "VectorRecorder", "schema_of"]
