"""Values in memory for every step: addresses, derived columns, and how they are stored."""
