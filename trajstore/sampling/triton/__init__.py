"""Kernels for GPUs, written with Triton. Importing this package does not import Triton.

- `table_layout`: the order of the numbers in the tables that kernels read.
- `batch_kernels`: draw windows, find their rows, copy them; `reward_kernels`: sum rewards.
- `tree_kernels`: draw from a sum tree and change it; `tree_launches` starts them.
- `launching`: starts kernels, and counts how many.
- `selection`: says whether kernels can be used on a device.
"""
