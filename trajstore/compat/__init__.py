"""Drop-in replacements for the replay buffers of other libraries, each a thin layer over `trajstore.ReplayBuffer`.

To move a program to trajstore, change one import and keep the remaining code.
"""

from trajstore.lazy_modules import lazy_modules

__getattr__, __dir__ = lazy_modules(
    "trajstore.compat", ("alf", "gymnasium", "objectrl", "rlinf", "stable_baselines3", "torchrl")
)
