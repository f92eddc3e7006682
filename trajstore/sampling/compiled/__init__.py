"""Loops compiled by numba for the CPU. Only `selection` can be imported without numba."""
