"""What is on disk: array layout and codecs, commit and checkpoint records, spans, the episode table."""
