"""The order of the numbers in the tables of int64 that kernels read.

Tables hold what is the same from batch to batch, so that a launch takes few arguments. Some of the numbers are
memory addresses, because a kernel that reads all columns of a batch can not have an argument for each of them.
"""

from __future__ import annotations

# Facts of a batch program.
PROGRAM = (
    "size",  # steps of a window
    "burn_in",
    "stride",
    "length",
    "lead",
    "reach",
    "start_rule",  # how the number of a window becomes its start
    "is_by_window",  # whether a draw is uniform over windows
    "count_rule",  # how many windows start in an episode; only read if draws are not uniform over windows
    "context",  # steps around the learning steps that must exist
    "needs_next",
    "leads_on",
    "n_low",  # smallest number of steps of an n-step return
    "n_choices",  # how many numbers of steps it is drawn from
    "n_lanes",
)
PLAIN_START, PAD_LEFT_START, PAD_BOTH_START = range(3)  # values of start_rule
STRICT_COUNT, SHORT_COUNT, PAD_BOTH_COUNT, EVERY_STEP_COUNT = range(4)  # values of count_rule

# A lane is one row that every step of a batch needs: a group of rows and one of its offsets.
LANE = (
    "origin",
    "offset",
    "reaches_final",
    "first",  # rows of all groups before its own, for each step
    "place",  # its place among the rows of its group
    "n_places",  # rows of its group for each step
)
ORIGINS = ("step", "observed", "reached")

# A column is one output that is copied from the cache.
COLUMN = (
    "arena",  # address
    "row_bytes",
    "slots",  # address of the page table; 0 if pages lie in the slots of their own numbers
    "page_rows",
    "first_rows",  # address of the sources' first virtual rows
    "first",  # as in LANE
    "n_places",  # as in LANE
    "is_scratch",  # whether its rows go to the scratch memory
    "offset",  # of its first row in the outputs or in the scratch memory
    "is_padded",
    "pattern",  # eight bytes of padding
    "width",  # bytes that are copied at a time: 16, 4 or 1
)
