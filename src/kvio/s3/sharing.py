"""Share one client per process and configuration between stores."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from typing import Final, cast

from kvio.s3.bounded import BlockingObjects, TimeLimited
from kvio.s3.objects import Connect, Objects
from kvio.s3.options import S3Options


@dataclass(slots=True)
class _Shared:
    objects: Objects
    users: int = 1


_clients: dict[tuple[Connect, S3Options], _Shared] = {}
_lock = threading.Lock()
#: Clients of the parent process. They are never freed: that would close connections which the
#: parent is using, or wait for threads which the child does not have.
_ABANDONED: Final[list[object]] = []


def acquire(connect: Connect, options: S3Options) -> Objects:
    """Return the client of a configuration; connect if there is none.

    Raises:
        ConfigError: the library does not support an option.
    """
    client_key = connect, _connection(options)
    with _lock:
        shared = _clients.get(client_key)
        if shared is not None:
            shared.users += 1
            return shared.objects
        objects = connect(options)
        if not objects.traits.own_timeouts:
            objects = TimeLimited(cast(BlockingObjects, objects), options)
        _clients[client_key] = _Shared(objects)
        return objects


def release(objects: Objects) -> None:
    """Stop using a client; close it if no other store uses it."""
    with _lock:
        for client_key, shared in _clients.items():
            if shared.objects is objects:
                shared.users -= 1
                if not shared.users:
                    del _clients[client_key]
                    break
                return
        else:
            return
    objects.close()


def abandon(objects: Objects) -> None:
    """Keep a client of the parent process alive without using it."""
    _ABANDONED.append(objects)


def _connection(options: S3Options) -> S3Options:
    """Return the options with those that do not affect a client set to fixed values."""
    return replace(
        options,
        prefix="",
        namespace="",
        retries=0,
        checksum="crc32c",
        conditional="probe",
        durability="visible",
        layout="block",
        verify="full",
    )


def _forget_all() -> None:
    global _lock  # another thread may have held it at the fork
    _lock = threading.Lock()
    _ABANDONED.extend(_clients.values())
    _clients.clear()


os.register_at_fork(after_in_child=_forget_all)
