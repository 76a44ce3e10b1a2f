"""pyACL facade: the place where ``import acl`` programs will find Ascend's Python API. None of it is built yet.

Every name raises :class:`NotSupported` with the name in it, so that a program fails at the first call that the
emulator cannot answer, and not later with a wrong result.

>>> import acl
>>> acl.init
Traceback (most recent call last):
    ...
acl.NotSupported: acl.init is not supported yet: this version has no pyACL functions; use the device package instead
"""

from typing import NoReturn


class NotSupported(AttributeError):
    """Say that a pyACL name is not built; an AttributeError, so that ``hasattr`` and feature tests work."""


def __getattr__(name: str) -> NoReturn:
    raise NotSupported(
        f"acl.{name} is not supported yet: this version has no pyACL functions; use the device package instead"
    )
