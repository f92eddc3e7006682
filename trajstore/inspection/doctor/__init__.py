"""Common mistakes in a store or a dataset: what looks wrong, why it matters and what to do.

`examination.examine` runs all checks: of the episode table (`episode_checks`), of the values of fields
(`field_checks`), of how the data are stored (`storage_checks`). Each check returns `finding.Finding`s.
"""
