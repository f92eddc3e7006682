"""The command line.

`app` builds it. Each other module holds a group of commands (`info`, `sample`, `verify`, `checkpoints`,
`import_export`, `rlinf`, `warm_up`) or what commands share (`parameters`, `stores`, `output`, `exit_codes`).
"""
