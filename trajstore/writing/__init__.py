"""From append to commit: validation, open episodes, staging, the commit thread, one stream."""
