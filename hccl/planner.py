"""From a checked call to a plan: choose, build, compile, price. Schedules and programs are shared by all shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from device import DeviceArray
from device.dtypes import dtype as dtype_of
from hccl.algorithms import build
from hccl.execute import Geometry
from hccl.plan import Plan
from hccl.program import Program, compile_program
from hccl.schedule import Schedule
from hccl.select import choose
from hccl.simulate import matrix
from hccl.types import OpCode, ReduceOp

if TYPE_CHECKING:
    from hccl.communicator import Communicator

_SPLIT = {  # operation: which of (x, out) is the whole buffer; None: as many bytes as the other times the ranks
    OpCode.ALL_GATHER: 1,
    OpCode.SPLIT: 1,
    OpCode.REDUCE_SCATTER: 0,
    OpCode.ALL_TO_ALL: 0,
}


_MADE_OF = {OpCode.BARRIER: OpCode.ALL_REDUCE, OpCode.SPLIT: OpCode.ALL_GATHER}


class Planner:
    """Makes the plans of one communicator."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._programs: dict[Any, tuple[Schedule, Program]] = {}

    def plan(self, code: OpCode, x: DeviceArray | None, out: DeviceArray, op: ReduceOp | None, root: int) -> Plan:
        """Work out everything that does not depend on when the call happens."""
        comm = self.comm
        whole = self._whole_bytes(code, x, out)
        name = _MADE_OF.get(code, code).label
        algo, options = choose(name, whole, comm.config)
        if code in (OpCode.BROADCAST, OpCode.REDUCE, OpCode.SCATTER):
            options = {**options, "root": root}
        schedule, program = self._program(name, algo, options)
        kind = dtype_of(out.dtype)
        geometry = Geometry.of(schedule, whole, kind.size)
        row = matrix(schedule, comm.topology, whole)[comm.rank]
        buffers = (out.address if x is None else x.address, out.address)
        count = out.size if x is None else x.size
        if code is OpCode.SCATTER:
            count = out.size
        scratch = self._large_scratch(schedule, geometry)
        return Plan(code, schedule, program, geometry, kind, op, count, row, buffers, scratch)

    def _whole_bytes(self, code: OpCode, x: DeviceArray | None, out: DeviceArray) -> int:
        """Bytes of the whole (gathered, unsplit) buffer: n of HCCL's cost table."""
        if code is OpCode.SCATTER:
            return out.nbytes * self.comm.size
        return (x if x is not None and _SPLIT.get(code, 0) == 0 else out).nbytes

    def _program(self, op: str, algo: str, options: dict[str, Any]) -> tuple[Schedule, Program]:
        key = (op, algo, tuple(sorted(options.items())))
        if key not in self._programs:
            comm = self.comm
            schedule = build(op, algo, comm.size, **options)
            domain = comm.domains

            def direct(a: int, b: int) -> bool:
                return domain[a] == domain[b]

            self._programs[key] = (schedule, compile_program(schedule, comm.rank, direct))
        return self._programs[key]

    def _large_scratch(self, schedule: Schedule, geometry: Geometry) -> DeviceArray | None:
        """Allocate scratch that does not fit in the CCL buffer; the plan owns it."""
        nbytes = schedule.n_scratch * geometry.chunk_bytes
        if nbytes <= self.comm.config.buffer_bytes:
            return None
        return self.comm.device.empty((nbytes,), "uint8")
