"""How fast and how large is a chip? Every number with its source; nothing else in `device` holds a hardware constant.

The time of a kernel is a roofline: launch, plus the longer of computing and moving its bytes. That is a bound, not a
measurement: real kernels are slower, never faster. Numbers marked (?) are derived or disputed; see their comment.

Sources, by their short names below:
    ini     platform configuration files that the CANN runtime ships, one per SoC (cores, clocks, memory, cache)
    MFU     Huawei's performance-analysis note, which divides by 378.88 / 353.89 / 294.91 TFLOPS for B1 / B2 / B3
    AscendC Ascend C best practices: 192 MB L2, about 1.6 TB/s of global memory bandwidth
    dmi     ascend-dmi user guide, bandwidth test: host to device 20-28 GB/s, device to host 25-30 GB/s
    msm     Ascend/msmodeling, device profiles
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from device.errors import ArgumentError

if TYPE_CHECKING:
    from device.kernels.kernel import Cost

_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True)
class ChipSpec:
    """Describe one NPU. Rates are per second, `_s` are seconds.

    Attributes:
        name: how programs ask for it.
        soc_name: what ``aclrtGetSocName`` answers.
        hbm_bytes, l2_bytes: memory sizes.
        ai_cores, vector_cores, clock_hz: cube cores, vector cores, and the clock of both.
        hbm_bytes_per_s: global memory bandwidth, reads and writes together.
        cube_flop_per_cycle: half-precision operations of one cube core per cycle (a multiply-add is two).
        vector_bytes_per_cycle: operand width of one vector core.
        h2d_bytes_per_s, d2h_bytes_per_s, host_link_s: copies between host and device, and the latency of one.
        launch_s: from the end of one task of a stream to the first instruction of the next.
    """

    name: str
    soc_name: str
    hbm_bytes: int
    l2_bytes: int
    ai_cores: int
    vector_cores: int
    clock_hz: float
    hbm_bytes_per_s: float
    # ini: a cube step is 16x16x16 multiply-adds of half precision = 8192 operations; MFU's figures are cores*clock*8192
    cube_flop_per_cycle: int = 8192
    # ini: the vector unit takes 256 bytes a cycle: 128 half or 64 single precision lanes
    vector_bytes_per_cycle: int = 256
    # dmi: middle of the ranges it calls normal
    h2d_bytes_per_s: float = 24e9
    d2h_bytes_per_s: float = 27.5e9
    # msm: latency of its PCIe link, upper of 3 and 4.5 µs
    host_link_s: float = 4.5e-6
    # (?) No vendor figure is published. An estimate between the notify cost of HCCL's task_profiling.h (1 µs, one
    # hardware-scheduled task without a kernel) and msm's fixed cost of one operation (10 µs).
    launch_s: float = 5e-6

    @property
    def cube_flop_per_s(self) -> float:
        """Dense half-precision peak of all cube cores."""
        return self.ai_cores * self.clock_hz * self.cube_flop_per_cycle

    def flop_per_s(self, unit: str, element_bytes: int) -> float:
        """Return the peak of one kind of core for operands of `element_bytes` each.

        Example:
            >>> round(spec("ascend910b").flop_per_s("cube", 2) / 1e12, 2)
            294.91
        """
        if unit == "vector":
            return self.vector_cores * self.clock_hz * self.vector_bytes_per_cycle / element_bytes
        if unit != "cube":
            raise ArgumentError(f"a kernel runs on 'cube' or 'vector', got {unit!r}")
        # int8 runs at twice the half rate (ini: K = 32 instead of 16). Single precision at a quarter (?): 74-91 TFLOPS
        # for B3...B1, as commonly quoted. There is no double precision unit; the same ratio once more keeps it finite.
        return self.cube_flop_per_s * {1: 2.0, 2: 1.0, 4: 1 / 4}.get(element_bytes, 1 / 16)

    def time_s(self, cost: Cost) -> float:
        """Return the roofline time of a kernel, launch included.

        Example:
            >>> from device.kernels import Cost
            >>> chip = spec("ascend910b")
            >>> round((chip.time_s(Cost(flops=0, bytes=1.6e9)) - chip.launch_s) * 1e3, 3)
            1.0
        """
        compute_s = cost.flops / self.flop_per_s(cost.unit, cost.element_bytes)
        return self.launch_s + max(compute_s, cost.bytes / self.hbm_bytes_per_s)

    def host_copy_s(self, nbytes: int, to_device: bool) -> float:
        """Return the time of one copy between host and device memory."""
        return self.host_link_s + nbytes / (self.h2d_bytes_per_s if to_device else self.d2h_bytes_per_s)


# Cores, clocks, memory and cache: ini. Bandwidth: AscendC for the variants with 192 MB of L2; half for the B4, which
# has half the memory stacks (?). A B1 reports 25 cores in npu-smi; ini's 24 is what kernels can use.
SPECS: dict[str, ChipSpec] = {
    chip.name: chip
    for chip in (
        ChipSpec("ascend910b1", "Ascend910B1", 64 * _GIB, 192 * _MIB, 24, 48, 1.85e9, 1.6e12),
        ChipSpec("ascend910b2", "Ascend910B2", 64 * _GIB, 192 * _MIB, 24, 48, 1.80e9, 1.6e12),
        ChipSpec("ascend910b3", "Ascend910B3", 64 * _GIB, 192 * _MIB, 20, 40, 1.80e9, 1.6e12),
        ChipSpec("ascend910b4", "Ascend910B4", 32 * _GIB, 96 * _MIB, 20, 40, 1.50e9, 0.8e12),
    )
}

# "910B" is a family. The B3 is meant when nobody says more: it is the variant that public npu-smi listings and
# hccl_test results of eight-card A2 servers name most, it has the 64 GiB of an Atlas 800T A2, and its peak is the
# lowest of the three that do.
_ALIASES = {"ascend910b": "ascend910b3", "910b": "ascend910b3", "atlas800t-a2": "ascend910b3"}


def spec(name: str | ChipSpec) -> ChipSpec:
    """Return the chip of this name; upper and lower case are the same, and ``Ascend`` may be left out.

    Raises:
        ArgumentError: there is no such chip.

    Example:
        >>> spec("Ascend910B").soc_name, spec("910b4").hbm_bytes >> 30
        ('Ascend910B3', 32)
    """
    if isinstance(name, ChipSpec):
        return name
    key = name.lower()
    key = _ALIASES.get(key, key)
    found = SPECS.get(key) or SPECS.get(f"ascend{key}")
    if found is None:
        raise ArgumentError(f"no chip is called {name!r}; known are {', '.join([*SPECS, *_ALIASES])}")
    return found
