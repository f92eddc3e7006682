"""Import datasets of other libraries into a store, and export stores to their formats.

`conversion.import_episodes` and `conversion.export_episodes` do the work: one episode at a time, resumable, and
verified by reading back. `formats.FORMATS` lists the formats. Each format module has ``open_reader`` and
``open_writer``.
"""
