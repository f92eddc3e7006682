"""A store at a URL: create, open, snapshots, checkpoints, garbage collection, copies, verification."""
