"""Which windows are drawn, and how they become batches."""
