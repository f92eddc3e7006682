"""The arrays of integers that `program_loops` works on: what stands at which position.

Addresses in them are memory addresses.

- ``program``: the numbers from `SIZE` to `MOST_STEPS`; then six numbers for each group of rows
  (`batch_program.RowGroup`): origin, whether it reaches the final row, whether it is padded, number of offsets, its
  first offset in ``offsets``, and the number of offsets of all groups before it. The rows of a group start at that
  number times the steps of a batch.
- ``index``: addresses of the arrays of the episode index and of the running sums, from `LOGICAL` on.
- ``columns``, eight numbers for each output: address of the arena, bytes of a row, address of the page table
  (`PageTable.slot_of_page`; 0 if pages lie in the slots of their own numbers), rows of a page, address of the
  sources' first virtual rows, address of the sizes of chunks of which blocks are decoded
  (`PageTable.bytes_of_page`; 0 if there are none), group, and address of a row that pads (0: pads repeat).
- ``outputs``: the address that each column's rows go to.
- ``call``: what differs from batch to batch, from `N_WINDOWS` on. Addresses are 0 where a batch has no such output.
- ``shifts``, two numbers for each of ``call`` and of ``outputs``: what it grows by with every window before a part
  of a batch, and with every thread before the one that makes the part. Intermediate results of a part lie in memory
  of its thread; a part is small enough that they stay in the processor's cache.
"""

from __future__ import annotations

HAS_FINAL, TERMINATED, TRUNCATED, OPEN, BEGINS = 1, 2, 4, 8, 32  # flags of episodes, as in `index_entries`

# Positions in ``program``.
SIZE, BURN_IN, STRIDE, LENGTH, N_GROUPS, LEADS_ON, N_STEPS, NEEDS_NEXT, HAS_FINAL_MASK = range(9)
N_DRAWN, BOUNDARY, LEAD, REACH, REWARD_BYTES, MOST_STEPS, GROUPS = range(9, 16)
GROUP_SIZE = 6
PLAIN, PAD_LEFT, PAD_BOTH = range(3)  # values of BOUNDARY: how the number of a window becomes its start

# Positions in ``index``.
LOGICAL, FLAGS, T_BASE, STREAM, EPISODE, SPAN_LOGICAL, SPAN_ROW, SPAN_SOURCE = range(8)
N_SPANS, IS_SIMPLE, SUMS, N_SUMS, SUMS_BASE, INDEX_SIZE = range(8, 14)

COLUMN_SIZE = 8

# Positions in ``call``.
N_WINDOWS, IS_DRAWN, SEED, COUNTER, LOW, LIMIT = range(6)
ENTRY, START, N_OF_WINDOW, HANDLES, ROWS, SOURCES, POSITIONS, EXISTS = range(6, 14)
TAKEN, IS_TERMINAL, GAMMA, REWARDS, RETURNS, DISCOUNTS, SEGMENTS, COPIES, FACTS = range(14, 23)
# N_COUNTER: of the drawn numbers of steps. PART_NUMBERS: address of a part's own ``call`` and ``outputs``.
# DECODERS: address of the thread's `BlockDecoders`.
SPANS, ROWS_OF_STARTS, N_COUNTER, PART_NUMBERS, DECODERS, MASKS = range(23, 29)
CALL_SIZE = MASKS + 7  # the last seven are the addresses of masks

# Positions in the argument of `run_parts`: addresses of the arrays, the number of columns, how many windows a part
# has, the next thread and part to number, and the first column with a page that is not resident.
JOB_PROGRAM, JOB_OFFSETS, JOB_INDEX, JOB_COLUMNS, JOB_OUTPUTS, JOB_CALL, JOB_SHIFTS = range(7)
JOB_N_COLUMNS, JOB_PART, JOB_NEXT_THREAD, JOB_NEXT_PART, JOB_FAILED, JOB_SIZE = range(7, 13)

# Facts of a window: the logical row of its episode, its steps and flags (BEGINS if it has its first step), the
# position of the window's first step, and which of its steps exist: from FIRST_INSIDE to STOP_INSIDE.
EPISODE_ROW, N_IN_EPISODE, FLAG, FIRST, FIRST_INSIDE, STOP_INSIDE, N_FACTS = range(7)
STEP, OBSERVED, REACHED = range(3)  # origins of groups
