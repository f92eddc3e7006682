"""The episodes that can be sampled, as tensors: which there are, where their rows are, and what has changed."""
