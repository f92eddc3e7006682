"""Questions about a store, answered with bounded memory.

`episode_queries` filters (`filters`, written in the language of `filter_syntax`), sorts and pages the episode table
by its columns (`episode_columns`). `downsampling` shortens time series for a plot. `field_statistics` summarises
the values of fields in a sample of rows (`row_samples`). `frames` finds fields that hold pictures.
`differences` compares two stores, `readings` follows a running session, `doctor` looks for common mistakes.
"""
