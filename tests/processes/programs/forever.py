"""Collectives without end; prints its pid once all are at it. forever.py MISMATCH makes rank 1 call another count."""

from __future__ import annotations

import os
import sys

import numpy as np

import hccl

with hccl.init() as comm:
    x = comm.device.array(np.ones(5000, "float32"))
    comm.all_reduce(x).numpy()
    print(f"rank {comm.rank} pid {os.getpid()}", flush=True)
    if sys.argv[1:] and comm.rank == 1:
        x = x[:-1]
    while True:
        comm.all_reduce(x, op="max")
        comm.device.synchronize()
