"""Import datasets of other libraries into a store, and export stores to their formats.

`conversion.import_episodes` and `conversion.export_episodes` do the work: one episode at a time, resumable, and
verified by reading back. `formats.FORMATS` lists the formats. Each format module has ``open_reader`` and
``open_writer``.
"""

from trajstore.lazy_modules import lazy_modules

__getattr__, __dir__ = lazy_modules(
    "trajstore.datasets",
    ("conversion", "d4rl", "diffusion_policy", "formats", "lerobot", "minari", "robomimic", "torchrl"),
)
