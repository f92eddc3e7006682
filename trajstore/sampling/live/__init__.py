"""Steps that a writer has appended and not committed yet, and how the index follows the writer."""
