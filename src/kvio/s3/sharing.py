"""One client per process and configuration, shared by the stores that use it."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from typing import Final, cast

from kvio.s3.bounded import Bounded, Fetching
from kvio.s3.objects import Connect, Objects
from kvio.s3.options import S3Options


@dataclass(slots=True)
class _Shared:
    objects: Objects
    users: int = 1


_clients: dict[tuple[Connect, S3Options], _Shared] = {}
_lock = threading.Lock()
#: Clients of a parent process. They are kept for ever: destroying one would touch connections
#: that the parent is using, or wait for threads that a child does not have.
_ABANDONED: Final[list[object]] = []


def take(connect: Connect, options: S3Options) -> Objects:
    """Give the client of a configuration, connecting if there is none.

    Raises:
        ConfigError: an option is one that the library cannot honour.
    """
    place = connect, _connection(options)
    with _lock:
        shared = _clients.get(place)
        if shared is not None:
            shared.users += 1
            return shared.objects
        objects = connect(options)
        if not objects.traits.bounded:
            objects = Bounded(cast(Fetching, objects), options)
        _clients[place] = _Shared(objects)
        return objects


def give_back(objects: Objects) -> None:
    """Stop using a client; the last user closes it."""
    with _lock:
        for place, shared in _clients.items():
            if shared.objects is objects:
                shared.users -= 1
                if not shared.users:
                    del _clients[place]
                    break
                return
        else:
            return
    objects.close()


def abandon(objects: Objects) -> None:
    """Never use or destroy a client again: it belongs to the parent process."""
    _ABANDONED.append(objects)


def _connection(options: S3Options) -> S3Options:
    """Leave of the options what makes a difference to a client."""
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
    global _lock  # it may have been held when the process was forked
    _lock = threading.Lock()
    _ABANDONED.extend(_clients.values())
    _clients.clear()


os.register_at_fork(after_in_child=_forget_all)
