"""The format on disk, as docs/format.md specifies it: arrays, records, spans and the episode table.

No module here reads or writes objects: they turn bytes and JSON into checked values and back.
"""
