"""Decoded chunks on the training device, paged like virtual memory."""
