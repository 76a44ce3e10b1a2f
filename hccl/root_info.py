"""How do ranks that share nothing find each other? Root info: 4108 bytes that say where the root listens.

The root opens a listener (`open_root`) and hands the bytes round by any means. Every member connects, shows the token
from the bytes (a stranger's connection is dropped), tells who it is, and gets the list of all. When each has made its
links it says so, and the root lets all go on together; or all hear what went wrong, with the ranks that never came.
The listener binds the loopback interface unless HCCL_IF_IP names another address.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from hccl.config import Config
from hccl.errors import ArgumentError, BrokenError, DisagreementError, HcclError, TimeoutError
from hccl.transport import Member
from hccl.types import HcclResult

ROOT_INFO_BYTES = 4108  # HCCL_ROOT_INFO_BYTES of hccl_types.h
_MAGIC = b"HCCLEMU1"
_FORMAT = struct.Struct("<8s16sH64s128s")  # magic, token, port, address, name of the communicator
_HELLO_S = 1.0  # for a latecomer to show its token
_PATIENCE_S = 5.0  # members wait this much longer than the root, so that the root's better message arrives


@dataclass(frozen=True)
class RootInfo:
    """What the bytes say."""

    token: bytes
    address: str
    port: int
    name: str

    def pack(self) -> bytes:
        """Return the 4108 bytes."""
        text = _FORMAT.pack(_MAGIC, self.token, self.port, self.address.encode(), self.name.encode())
        return text.ljust(ROOT_INFO_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> RootInfo:
        """Read the bytes. Raises `ArgumentError` when they are not root info."""
        if not isinstance(data, bytes | bytearray | memoryview) or len(data) != ROOT_INFO_BYTES:
            got = f"{len(data)} bytes" if hasattr(data, "__len__") else type(data).__name__
            raise ArgumentError(f"root info is {ROOT_INFO_BYTES} bytes from get_root_info(), got {got}")
        magic, token, port, address, name = _FORMAT.unpack_from(data)
        if magic != _MAGIC:
            raise ArgumentError("these bytes are not root info of this version of the emulator")
        try:
            return cls(token, address.rstrip(b"\0").decode("ascii"), port, name.rstrip(b"\0").decode())
        except UnicodeDecodeError:
            raise ArgumentError("these bytes are damaged root info: the root's address or name is not text") from None


def open_root(timeout_s: float | None = None, port: int = 0, token: bytes | None = None) -> bytes:
    """Start listening for one round of members and return the root info. The listener ends with the round or the limit.

    timeout_s: wall seconds until all must have come; HCCL_CONNECT_TIMEOUT or 120 if left out.
    """
    address = os.environ.get("HCCL_IF_IP", "127.0.0.1").split("%")[0]
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise HcclError(f"the root cannot listen on {address} port {port}: {error}", HcclResult.E_UNAVAIL) from error
    port = listener.getsockname()[1]
    name = f"{address}_{port}_{os.getpid()}_{time.time_ns() // 1000}"  # as HCCL: ip, port, device, time stamp
    info = RootInfo(token or secrets.token_bytes(16), address, port, name)
    limit = Config.from_environment().connect_timeout_s if timeout_s is None else timeout_s
    threading.Thread(target=_Round(listener, info.token, limit).run, name="hccl root", daemon=True).start()
    return info.pack()


@dataclass
class _Round:
    """The root's side of one meeting."""

    listener: socket.socket
    token: bytes
    limit_s: float
    channels: dict[int, _Channel] = field(default_factory=dict)
    members: dict[int, Member] = field(default_factory=dict)
    pending: list[_Channel] = field(default_factory=list)  # have connected, have not said who they are

    def run(self) -> None:
        try:
            self._collect()
            self._tell({"members": [self.members[r].to_json() for r in sorted(self.members)]})
            answers = {rank: channel.read(self.limit_s) for rank, channel in self.channels.items()}
            failed = [
                answer["error"] if answer else f"{self.members[rank].who} went away"
                for rank, answer in sorted(answers.items())
                if not answer or "error" in answer
            ]
            if failed:
                raise BrokenError("making the communicator: " + "; ".join(failed))
            self._tell({"go": True})
        except HcclError as error:
            message = {"error": str(error), "kind": type(error).__name__}
            self._tell(message)
            self._tell_latecomers(message)
        except OSError:
            pass  # the listener was closed under us: the process ends
        finally:
            self.listener.close()
            for channel in self.channels.values():
                channel.close()

    def _collect(self) -> None:
        """Accept members until all are here."""
        deadline = time.monotonic() + self.limit_s
        wanted: int | None = None
        pending = self.pending
        while wanted is None or len(self.members) < wanted:
            self._drop_leavers()
            self.listener.settimeout(0.05 if pending else min(0.2, max(0.01, deadline - time.monotonic())))
            with contextlib.suppress(socket.timeout):
                pending.append(_Channel(self.listener.accept()[0]))
            for channel in list(pending):
                hello = channel.poll()
                if hello is None:
                    continue
                pending.remove(channel)
                if not hello or hello.get("token") != self.token.hex():
                    channel.close()  # a stranger
                    continue
                try:
                    member = Member.from_json(hello["member"])
                except (KeyError, TypeError):
                    channel.close()  # knows the token, but is not of this version
                    continue
                wanted = self._admit(member, channel, wanted)
            if time.monotonic() > deadline:
                missing = "" if wanted is None else _names([r for r in range(wanted) if r not in self.members])
                who = missing or "nobody at all"
                text = (
                    f"{who} did not come within {self.limit_s:g} s"
                    if missing
                    else f"{who} came within {self.limit_s:g} s"
                )
                raise TimeoutError(
                    f"making the communicator: {text}; present: {_names(sorted(self.members)) or 'none'}"
                )

    def _admit(self, member: Member, channel: _Channel, wanted: int | None) -> int:
        first = next(iter(self.members.values()), member)
        self.channels.setdefault(member.rank, channel)
        if member.n_ranks != first.n_ranks:
            raise DisagreementError(
                f"making the communicator: rank {first.rank} expects {first.n_ranks} ranks, "
                f"rank {member.rank} expects {member.n_ranks}"
            )
        if member.rank in self.members:
            other = self.members[member.rank]
            channel.write(
                {"error": f"rank {member.rank} has connected already (pid {other.pid})", "kind": "ArgumentError"}
            )
            raise ArgumentError(
                f"making the communicator: two processes claim rank {member.rank}: pid {other.pid} and pid {member.pid}"
            )
        if member.config != first.config:
            raise DisagreementError(
                f"making the communicator: rank {first.rank} has {first.config}; rank {member.rank} has {member.config}"
            )
        self.members[member.rank] = member
        return member.n_ranks

    def _drop_leavers(self) -> None:
        for rank, channel in self.channels.items():
            if channel.gone():
                raise BrokenError(f"making the communicator: {self.members[rank].who} went away")

    def _tell(self, message: dict[str, Any]) -> None:
        """Tell all; members of this process last, since it may end, and this thread with it, as soon as they know."""
        here = os.getpid()
        for rank in sorted(self.channels, key=lambda r: r in self.members and self.members[r].pid == here):
            self.channels[rank].write(message)

    def _tell_latecomers(self, message: dict[str, Any]) -> None:
        """Members that come after the round has failed shall hear why; the limit runs once more."""
        end = time.monotonic() + self.limit_s
        while time.monotonic() < end:
            self.listener.settimeout(max(0.01, end - time.monotonic()))
            with contextlib.suppress(socket.timeout):
                channel = self.pending.pop() if self.pending else _Channel(self.listener.accept()[0])
                if channel.read(_HELLO_S).get("token") == self.token.hex():
                    channel.write(message)
                channel.close()


class _Channel:
    """One connection that carries JSON lines."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.buffer = b""

    def write(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # whoever went away is reported by what it does not answer
            self.socket.settimeout(10.0)
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def poll(self) -> dict[str, Any] | None:
        """Return a message if one is there; {} when the other side has gone or talks nonsense."""
        try:
            return self._receive(0.0)
        except BlockingIOError:
            return None

    def read(self, timeout_s: float) -> dict[str, Any]:
        """Wait for a message; {} when the other side has gone. Raises `TimeoutError` of sockets."""
        deadline = time.monotonic() + timeout_s
        while True:
            message = self._receive(max(0.01, deadline - time.monotonic()))
            if message is not None:
                return message

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        if b"\n" not in self.buffer:
            self.socket.settimeout(timeout_s)
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                return {}
            self.buffer += data
        if b"\n" not in self.buffer:
            return None if len(self.buffer) < 1 << 26 else {}
        line, self.buffer = self.buffer.split(b"\n", 1)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return {}
        return message if isinstance(message, dict) else {}

    def gone(self) -> bool:
        """Tell whether the other side has closed."""
        self.socket.settimeout(0.0)
        try:
            return self.socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


class Meeting:
    """A member's side: `gather` gets the members, `confirm` waits until all are linked.

    Raises: `BrokenError` when the root cannot be reached or has gone, what the root says went wrong, `TimeoutError`.
    """

    def __init__(self, data: bytes, member: Member, timeout_s: float, root_is_late: bool = False) -> None:
        self._info = RootInfo.unpack(data)
        self._member = member
        self._limit_s = timeout_s
        where = f"{self._info.address} port {self._info.port}"
        self._root = f"the root at {where}"
        try:
            connection = self._knock(timeout_s if root_is_late else 0.0)
        except (OSError, UnicodeError) as error:  # UnicodeError: an address that cannot be a host name
            raise BrokenError(
                f"rank {member.rank}: {self._root} does not answer ({error}); has its process ended, or was this root "
                "info used before? One get_root_info() makes one communicator",
                HcclResult.E_TCP_CONNECT,
            ) from error
        self._channel = _Channel(connection)

    def _knock(self, patience_s: float) -> socket.socket:
        """Connect; as long as nobody listens there, try again for `patience_s`."""
        end = time.monotonic() + patience_s
        while True:
            try:
                return socket.create_connection((self._info.address, self._info.port), timeout=self._limit_s)
            except ConnectionRefusedError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)

    @property
    def name(self) -> str:
        """Name of the communicator, the same for all members."""
        return self._info.name

    def gather(self) -> list[Member]:
        """Introduce this rank and return all members by rank."""
        self._channel.write({"token": self._info.token.hex(), "member": self._member.to_json()})
        return [Member.from_json(m) for m in self._answer()["members"]]

    def confirm(self, error: str | None) -> None:
        """Say that this rank is linked (or why not) and wait until all are."""
        self._channel.write({"ok": True} if error is None else {"error": error})
        self._answer()
        self._channel.close()

    def _answer(self) -> dict[str, Any]:
        try:
            message = self._channel.read(self._limit_s + _PATIENCE_S)
        except builtins.TimeoutError:
            raise TimeoutError(
                f"rank {self._member.rank}: {self._root} did not answer within {self._limit_s + _PATIENCE_S:g} s"
            ) from None
        if not message:
            raise BrokenError(
                f"rank {self._member.rank}: {self._root} closed the connection: its process has ended, or this root "
                "info was used before",
                HcclResult.E_TCP_CONNECT,
            )
        if "error" in message:
            kinds: dict[str, type[HcclError]] = {
                c.__name__: c for c in (ArgumentError, BrokenError, DisagreementError, TimeoutError)
            }
            raise kinds.get(message.get("kind", ""), BrokenError)(f"rank {self._member.rank}: {message['error']}")
        return message


def _names(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}" if ranks else ""
