"""Which line of the user's program asked for this?

Allocations and frees remember the innermost frame outside this project's own packages, so that a leak or a use after
free can be reported with a line that the user wrote. Remembering must be cheap (it happens at every malloc), so only
the code object and the instruction are kept; the line is worked out when a message is written.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

Site = tuple[CodeType, int]

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OURS = tuple(os.path.join(_ROOT, package) + os.sep for package in ("device", "hccl", "parallel", "acl"))
_internal: dict[str, bool] = {}  # memo of _is_internal: a dict lookup costs a tenth of the prefix test


def call_site() -> Site | None:
    """Return where the innermost frame outside this project's packages stands; None if there is no frame at all.

    Work that starts in the project itself (``python -m hccl.bench``) is put down to the outermost of its own frames.
    """
    frame: FrameType | None = sys._getframe(1)
    outermost: FrameType | None = None
    while frame is not None:
        filename = frame.f_code.co_filename
        internal = _internal.get(filename)
        if internal is None:
            internal = _internal[filename] = _is_internal(filename)
        if not internal:
            return frame.f_code, frame.f_lasti
        if not filename.startswith("<"):
            outermost = frame
        frame = frame.f_back
    return None if outermost is None else (outermost.f_code, outermost.f_lasti)


def locate(site: Site) -> tuple[str, int]:
    """Return the file name and the line number of a site."""
    code, instruction = site
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return code.co_filename, line
    return code.co_filename, code.co_firstlineno


def describe(site: Site | None) -> str:
    """Return ``FILE:LINE``, the file relative to the working directory where it lies below it.

    Example:
        >>> describe(None)
        'an unknown line'
    """
    if site is None:
        return "an unknown line"
    filename, line = locate(site)
    here = os.getcwd() + os.sep
    return f"{filename[len(here) :] if filename.startswith(here) else filename}:{line}"


def _is_internal(filename: str) -> bool:
    return filename.startswith("<frozen ") or os.path.abspath(filename).startswith(_OURS)
