"""From drawn windows to batches: plans of rows and masks, reading, output memory."""
