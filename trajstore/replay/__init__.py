"""The live buffer: append, sample, retention, pacing, checkpoints, resume."""
