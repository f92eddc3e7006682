"""Loops compiled with numba, for the CPU. Modules here are imported only where numba is wanted."""
