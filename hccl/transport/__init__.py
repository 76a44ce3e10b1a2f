"""How do bytes get from one rank to another? One `Link` per peer; three kinds with one contract."""

from __future__ import annotations

from hccl.transport.base import Link, Member, Transfer

__all__ = ["Link", "Member", "Transfer"]
