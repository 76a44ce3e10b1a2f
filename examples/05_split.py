"""Communicators within communicators: ranks as a grid, with one group per row and one per column.

Data, tensor and pipeline parallelism are just such groups over the same ranks.

Run: python launch.py -n 4 examples/05_split.py
"""

import numpy as np

import hccl

with hccl.init() as comm:
    columns = 2 if comm.size % 2 == 0 else 1
    row, column = divmod(comm.rank, columns)

    # Ranks that give the same color come into one communicator. All ranks take part in a split.
    across = comm.split(color=row)  # the ranks of my row
    down = comm.split(color=column)  # the ranks of my column

    x = comm.device.array(np.array([comm.rank], np.int64))
    row_sum = int(across.all_reduce(x, out=comm.device.empty(1, np.int64)).numpy()[0])
    column_sum = int(down.all_reduce(x, out=comm.device.empty(1, np.int64)).numpy()[0])

    # `sub` names the members instead; only they need to call it.
    corners = comm.sub(sorted({0, comm.size - 1}))
    corner = "-" if corners is None else f"rank {corners.rank} of {corners.size}"

    lines = comm.all_gather(comm.device.array(np.array([[row, column, row_sum, column_sum]], np.int64))).numpy()
    if comm.rank == 0:
        print("rank  row  column  sum over row  sum over column")
        for rank, (r, c, over_row, over_column) in enumerate(lines):
            print(f"{rank:4}  {r:3}  {c:6}  {over_row:12}  {over_column:15}")
        print("in the communicator of the corners, rank 0 is", corner)

    for group in (across, down, corners):
        if group is not None:
            group.close()
