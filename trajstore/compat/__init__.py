"""Drop-in replacements for the replay buffers of other libraries, each a thin layer over `trajstore.ReplayBuffer`.

To move a program to trajstore, change one import and keep the remaining code.
"""
