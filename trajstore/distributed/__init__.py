"""Several ranks that write one store: the rank group, partitions, redistribution, checkpoint requests."""
