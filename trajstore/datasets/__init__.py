"""Datasets of other libraries in and out: streamed episode by episode, resumable, verified."""
