"""Records what Gymnasium environments do."""

from trajstore.compat.gymnasium.recorder import FieldOptions, Recorder, VectorRecorder, schema_of

__all__ = ["FieldOptions", "Recorder", "VectorRecorder", "schema_of"]
