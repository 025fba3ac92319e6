"""DLIO's names and kvio's keys: a key is the path without what makes it absolute."""

from __future__ import annotations

import posixpath

from kvio.errors import InvalidKeyError
from kvio.types import check_key


def key_of(name: object) -> str:
    """Give the key of a path as DLIO writes it: ``/data/a``, ``data/a`` and ``./data/a`` are one.

    Raises:
        InvalidKeyError: the path goes up, or has a character that keys have not.
    """
    text = str(name)
    if ".." in text.split("/"):
        raise InvalidKeyError(f"DLIO's folder {text!r} goes up with '..': kvio keys cannot")
    key = posixpath.normpath(f"/{text}").lstrip("/")
    check_key(key)
    return key


def path_of(name: object) -> str:
    """Give the path DLIO may make absolute as often as it likes: it stays the same."""
    return f"/{key_of(name)}"
