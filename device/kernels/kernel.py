"""What is a kernel? A pair: what it does to memory (`run`), and what the NPU would spend on it (`cost`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Cost:
    """State what a kernel asks of the chip; `ChipSpec.time_s` makes seconds of it.

    Attributes:
        flops: operations; a multiply-add is two.
        bytes: traffic with global memory, reads plus writes.
        unit: the cores that do the work: ``"cube"`` for matrix products, ``"vector"`` for the rest.
        element_bytes: size of the operands; narrower ones are computed faster.
    """

    flops: float
    bytes: float
    unit: Literal["cube", "vector"] = "vector"
    element_bytes: int = 2


@dataclass(frozen=True)
class Kernel:
    """Something a device can do; `Device.launch(kernel, *args, **kwargs)` queues it.

    Attributes:
        name: shown in timelines and messages.
        run: called with the arguments of the launch, each device array replaced by a NumPy view of its memory. It
            writes into the arrays it was given. It returns None, or an iterator (it may be a generator function) that
            yields None wherever tasks of other streams may go first.
        cost: called with the same arguments; looks at shapes and types only.

    Example:
        >>> import numpy as np
        >>> from device import Device
        >>> negate = Kernel("negate", lambda x, out: np.negative(x, out=out), lambda x, out: Cost(x.size, 2 * x.nbytes))
        >>> with Device() as npu:
        ...     x = npu.array(np.array([1.0, -2.0]))
        ...     npu.launch(negate, x, x)
        ...     x.numpy().tolist()
        [-1.0, 2.0]
    """

    name: str
    run: Callable[..., Iterator[None] | object]
    cost: Callable[..., Cost]
