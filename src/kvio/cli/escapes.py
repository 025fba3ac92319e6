"""Convert file names to keys and back, for ``put -r --escape`` and ``get --prefix --escape``.

In each part of a path, a byte that is not allowed in a key becomes ``=`` and two hexadecimal
digits; so does ``=`` itself. If the result cannot begin a part of a key, its first byte is escaped
too and ``_`` is prepended: ``.bashrc`` is ``_=2Ebashrc``, and ``my file`` is ``my=20file``.
"""

from __future__ import annotations

import os
import re
from typing import Final

_INVALID: Final = re.compile(rb"[^A-Za-z0-9._@+-]")
_INVALID_START: Final = re.compile(rb"[^A-Za-z0-9_]|_=")
_NOT_IN_NAMES: Final = re.compile(rb"[/\0]")
_ESCAPED: Final = re.compile(rb"=([0-9A-F]{2})")


def escape(path: str) -> str:
    """Return the key for a path of names joined by ``/``."""
    return "/".join(_escape_part(os.fsencode(part)).decode() for part in path.split("/"))


def _escape_part(name: bytes) -> bytes:
    part = _INVALID.sub(_code, name)
    if not _INVALID_START.match(part):
        return part
    return b"_=%02X" % name[0] + _INVALID.sub(_code, name[1:])


def _code(match: re.Match[bytes]) -> bytes:
    return b"=%02X" % match[0][0]


def unescape(key: str) -> str:
    """Return the path for a key from `escape`; parts that `escape` did not make are kept."""
    return "/".join(os.fsdecode(_unescape_part(part.encode())) for part in key.split("/"))


def _unescape_part(part: bytes) -> bytes:
    name = part[1:] if part.startswith(b"_=") else part
    name = _ESCAPED.sub(lambda match: bytes((int(match[1], 16),)), name)
    # No file name has a slash or a NUL byte; "." and ".." would leave the target directory.
    valid = name not in (b".", b"..") and not _NOT_IN_NAMES.search(name)
    return name if valid and _escape_part(name) == part else part
