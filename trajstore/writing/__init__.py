"""Writing a stream: from `Writer.append` to the commit.

`writer` is the entry point, and `open_stream` is what it holds. `validation` checks values, `episode_stager` copies
them into a `staging`, `commit_pipeline` hands stagings to the `commit_thread`, `placement` arranges their rows by
episode, and `stream_appender` writes chunks and the commit record.
"""
