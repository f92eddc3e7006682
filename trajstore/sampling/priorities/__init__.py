"""Prioritised draws: options, masses, exact sums and updates."""
