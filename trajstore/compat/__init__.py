"""Faces that users of other libraries know, each thin over the real buffer: change one import and keep the rest."""
