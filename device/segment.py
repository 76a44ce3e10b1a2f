"""Where do the bytes of a device lie, and how do other processes reach them?

A `Segment` is one sparse shared mapping: an anonymous file (``memfd_create``), elsewhere a temporary file that is
unlinked as soon as all have mapped it. It takes no memory until it is touched, does not depend on the size of
``/dev/shm``, and vanishes with its last process, however that ends. Peers on the same host map it through
``/proc/PID/fd``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from device.errors import ArgumentError, ClosedError, DeviceError, OutOfMemoryError

# Python exports the constant from 3.13 on; the number is that of Linux on x86 and Arm.
_MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class Segment:
    """Own one shared mapping; made by `create` in one process and by `attach` in the others.

    Attributes:
        nbytes: length of the mapping.
        owner: whether this process created it.

    Example:
        >>> with Segment.create(4096, "demo") as mine, Segment.attach(mine.descriptor()) as other:
        ...     mine.array[7] = 42
        ...     int(other.array[7])
        42
    """

    __slots__ = ("_array", "_buffer", "_fd", "_map", "_path", "nbytes", "owner")

    def __init__(self, fd: int, nbytes: int, path: str | None, owner: bool) -> None:
        """Map an open file; `create` and `attach` call this. Takes over `fd`, also when it fails."""
        self._fd = fd
        self._path = path
        self.nbytes = nbytes
        self.owner = owner
        try:
            self._map: mmap.mmap | None = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise OutOfMemoryError(
                f"cannot map {nbytes} bytes of address space: {error}; a limit on virtual memory (ulimit -v) may be set"
            ) from error
        self._buffer: memoryview | None = memoryview(self._map)
        self._array: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, np.uint8)

    @classmethod
    def create(cls, nbytes: int, name: str = "device") -> Segment:
        """Make a sparse mapping of `nbytes` zero bytes; `name` shows in ``/proc/PID/maps``.

        Raises:
            ArgumentError: `nbytes` is not positive.
            OutOfMemoryError: the system refuses a file or an address range of this size.
        """
        if nbytes <= 0:
            raise ArgumentError(f"a segment needs at least one byte, got {nbytes}")
        path: str | None = None
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(name, os.MFD_CLOEXEC)
        else:
            import tempfile  # not at the top: it costs two milliseconds that Linux never needs

            fd, path = tempfile.mkstemp(prefix=f"{name}-")
        try:
            os.ftruncate(fd, nbytes)
        except OSError as error:
            os.close(fd)
            if path is not None:
                os.unlink(path)
            raise OutOfMemoryError(f"cannot make a sparse shared file of {nbytes} bytes: {error}") from error
        return cls(fd, nbytes, path, owner=True)

    @classmethod
    def attach(cls, descriptor: dict[str, Any]) -> Segment:
        """Map what `descriptor` of another process (or of this one) names.

        Raises:
            DeviceError: its process is gone, is another user's, or has closed the segment.
        """
        path = descriptor.get("path")
        try:
            fd = os.open(path or f"/proc/{descriptor['pid']}/fd/{descriptor['fd']}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceError(
                f"cannot reach the memory of process {descriptor['pid']}: {error.strerror}; it must run on this host, "
                f"under the same user, and be alive"
            ) from error
        if os.fstat(fd).st_ino != descriptor["inode"]:
            os.close(fd)
            raise DeviceError(
                f"process {descriptor['pid']} has closed the memory that it offered (file descriptor "
                f"{descriptor['fd']} is another file now)"
            )
        return cls(fd, descriptor["nbytes"], path, owner=False)

    def descriptor(self) -> dict[str, Any]:
        """Return what `attach` needs, in plain values that survive JSON."""
        self._open()
        return {
            "pid": os.getpid(),
            "fd": self._fd,
            "nbytes": self.nbytes,
            "inode": os.fstat(self._fd).st_ino,
            "path": self._path,
        }

    @property
    def buffer(self) -> memoryview:
        """The mapping as a memoryview of bytes."""
        self._open()
        assert self._buffer is not None
        return self._buffer

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The mapping as a NumPy array of bytes."""
        self._open()
        assert self._array is not None
        return self._array

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._map is None

    def discard(self, offset: int, nbytes: int) -> None:
        """Give the whole pages inside a range back to the system; they read as zero afterwards.

        Does nothing where the system has no such call.
        """
        page = mmap.PAGESIZE
        start = -(-offset // page) * page
        end = (offset + nbytes) // page * page
        if start < end and hasattr(mmap, "MADV_REMOVE"):
            mapping = self._open()
            mapping.madvise(mmap.MADV_REMOVE, start, end - start)

    def unlink(self) -> None:
        """Remove the name of a named file, once all have mapped it; an anonymous file has none."""
        if self._path is not None and self.owner:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._path = None

    def close(self) -> None:
        """Drop the mapping. If NumPy arrays still lie over it, it goes with the last of them. May be called again."""
        mapping, self._map = self._map, None
        if mapping is None:
            return
        self.unlink()
        self._array = None
        if self._buffer is not None:
            with contextlib.suppress(BufferError):  # somebody cast it and keeps the result
                self._buffer.release()
            self._buffer = None
        os.close(self._fd)
        with contextlib.suppress(BufferError):
            mapping.close()

    def _open(self) -> mmap.mmap:
        if self._map is None:
            raise ClosedError("the shared memory segment is closed")
        return self._map

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_map", None) is not None:
            self.close()
