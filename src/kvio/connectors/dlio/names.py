"""Convert DLIO's paths to keys: a key is the path without a leading ``/``."""

from __future__ import annotations

import posixpath

from kvio.errors import InvalidKeyError
from kvio.types import check_key


def key_of(name: object) -> str:
    """Return the key of a path; ``/data/a``, ``data/a`` and ``./data/a`` have the same key.

    Raises:
        InvalidKeyError: the path has ``..`` or a character that is invalid in keys.
    """
    text = str(name)
    if ".." in text.split("/"):
        raise InvalidKeyError(f"DLIO's folder {text!r} goes up with '..': kvio keys cannot")
    key = posixpath.normpath(f"/{text}").lstrip("/")
    check_key(key)
    return key


def path_of(name: object) -> str:
    """Return the absolute path of a key, which DLIO can make absolute again without a change."""
    return f"/{key_of(name)}"
