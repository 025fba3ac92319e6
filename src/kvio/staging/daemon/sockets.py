"""Unix sockets of packets: a private directory, peer credentials, messages, descriptors.

Packets (SOCK_SEQPACKET) keep messages apart: one that is malformed cannot shift where the next
begins, none arrives in part, and a descriptor belongs to exactly one.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import time
from typing import Final, NamedTuple

from kvio.errors import AccessDeniedError, ConfigError, storage_error
from kvio.staging.daemon.protocol import MAX_BYTES, Message, decode, encode
from kvio.url import StoreURL

#: Options that do not change the stored data, and default values.
_NOT_NAMED: Final = frozenset({"root", "create", "verify"})
_UNDERSTOOD: Final = {"durability": "visible", "layout": "block"}


def name_of(url: StoreURL) -> str:
    """Return the name of a store, without secrets, equal for all that store in the same way."""
    options = url.without_secrets().options
    path = str(options.get("root") or url.path)
    if path and not url.host:
        path = os.path.realpath(path)
    named = [
        f"{name}={value}"
        for name, value in sorted(options.items())
        if name not in _NOT_NAMED and value != _UNDERSTOOD.get(name)
    ]
    return f"{url.scheme}://{url.host}{path}" + (f"?{'&'.join(named)}" if named else "")


#
# Packets (SOCK_SEQPACKET) keep messages apart: one that is malformed cannot shift where the next
# begins, none arrives in part, and a descriptor belongs to exactly one.


_UCRED: Final = struct.Struct("=iII")  # unix(7): struct ucred
_BACKLOG: Final = 128


class Peer(NamedTuple):
    """The peer process when it connected, as the kernel reports it."""

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """Return the credentials of the peer from the kernel."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _gid = _UCRED.unpack(raw)
    return Peer(pid, uid)


class Listener:
    """A socket that only this user can connect to: 0600, in a directory of 0700.

    A lock beside it shows whether the daemon of a socket is alive. The socket of one that is gone
    is replaced; any other file of that name stays, at the start and at the end.

    Raises:
        ConfigError: another daemon listens there, the name is taken by a file that is no socket,
            or the directory is open to others.
        StorageError: the socket cannot be made.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        try:
            _private_directory(os.path.dirname(self.path))
            self._lock = _lock(f"{self.path}.lock")
        except OSError as exc:
            if isinstance(exc, AccessDeniedError):
                raise
            raise storage_error(exc.errno or 0, f"make the socket {self.path}") from exc
        try:
            self.socket = self._bind()
        except BaseException:
            os.close(self._lock)
            raise

    def _bind(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            found = _lstat(self.path)
            if found is not None:
                if not stat.S_ISSOCK(found.st_mode):
                    raise ConfigError(f"{self.path} is no socket and is kept: choose another name")
                os.unlink(self.path)  # we have the lock: its creator is gone
            sock.bind(self.path)
            self._made = os.lstat(self.path)
            os.chmod(self.path, 0o600)  # no client connects before listen()
            sock.listen(_BACKLOG)
        except ConfigError:
            sock.close()
            raise
        except OSError as exc:
            sock.close()
            if exc.errno is None:
                raise ConfigError(f"socket {self.path}: {exc}") from exc
            raise storage_error(exc.errno, f"make the socket {self.path}") from exc
        return sock

    def stop(self) -> None:
        """Accept no more connections, and wake the thread that waits for one."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was stopped before

    def close(self) -> None:
        """Remove the socket."""
        self.stop()
        self.socket.close()
        found = _lstat(self.path)
        if found is not None and os.path.samestat(found, self._made):
            os.unlink(self.path)
        os.close(self._lock)


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _private_directory(path: str) -> None:
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.stat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(f"the socket's directory {path} is not ours")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"the socket's directory {path} is open to others: {mode:04o}, not 0700")


def _lock(path: str) -> int:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(lock, 0o600)  # whatever the umask took
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(f"another drain daemon has {path.removesuffix('.lock')}") from None
    return lock


def connect(path: str) -> socket.socket:
    """Connect to a daemon of this user.

    Raises:
        AccessDeniedError: the daemon belongs to another user.
        StorageError: no daemon listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(path)
        uid = peer_of(sock).uid
        if uid != os.geteuid():
            raise AccessDeniedError(f"the drain daemon at {path} runs as uid {uid}, not as ours")
    except OSError as exc:
        sock.close()
        if isinstance(exc, AccessDeniedError):
            raise
        if exc.errno is None:
            raise ConfigError(f"socket {path}: {exc}") from exc
        raise storage_error(exc.errno, f"connect to the drain daemon at {path}") from exc
    except BaseException:
        sock.close()
        raise
    return sock


def send(sock: socket.socket, message: Message, *, fd: int | None = None) -> None:
    """Send a message, with a descriptor if one is passed."""
    data = encode(message)
    if fd is None:
        sock.send(data, socket.MSG_NOSIGNAL)
    else:
        socket.send_fds(sock, [data], [fd], socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> Message | None:
    """Wait for a message; None: the peer has disconnected. Descriptors with it are closed.

    Raises:
        ProtocolError: it is malformed.
    """
    data = sock.recv(MAX_BYTES + 1)
    return decode(data) if data else None


def poll(sock: socket.socket, seconds: float) -> bytes | None:
    """Poll for a packet without sleeping; None: there is none yet.

    The socket must have no timeout, because with one it would sleep all the same.
    """
    ends = time.perf_counter() + seconds
    while True:
        try:
            return sock.recv(MAX_BYTES + 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if time.perf_counter() >= ends:
                return None
            os.sched_yield()  # the processor may be the one that the answer needs


def receive_fd(sock: socket.socket) -> tuple[Message | None, int | None]:
    """Wait for a message that may have a descriptor with it, which the caller closes."""
    data, fds, _, _ = socket.recv_fds(sock, MAX_BYTES + 1, 1, socket.MSG_CMSG_CLOEXEC)
    fd = fds[0] if fds else None
    try:
        return (decode(data) if data else None), fd
    except BaseException:
        if fd is not None:
            os.close(fd)
        raise
