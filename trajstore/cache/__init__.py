"""Keeps decoded chunks on the training device, paged like virtual memory, within a byte budget."""
