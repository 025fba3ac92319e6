"""Names of files as keys, and back: for ``put -r --escape`` and ``get --prefix --escape``.

In each part of a path a byte that a key cannot have is ``=`` and two hexadecimal digits, ``=``
itself among them. A part that then does not begin as a part of a key must has its first byte
written so, too, behind a ``_``: ``.bashrc`` is ``_=2Ebashrc``, and ``my file`` is ``my=20file``.
"""

from __future__ import annotations

import os
import re
from typing import Final

_UNFIT: Final = re.compile(rb"[^A-Za-z0-9._@+-]")
_UNFIT_AT_FIRST: Final = re.compile(rb"[^A-Za-z0-9_]|_=")
_NEVER: Final = re.compile(rb"[/\0]")
_ESCAPED: Final = re.compile(rb"=([0-9A-F]{2})")


def escape(path: str) -> str:
    """Turn a path of names, joined by ``/``, into a key."""
    return "/".join(_escape_part(os.fsencode(part)).decode() for part in path.split("/"))


def _escape_part(name: bytes) -> bytes:
    part = _UNFIT.sub(_code, name)
    if not _UNFIT_AT_FIRST.match(part):
        return part
    return b"_=%02X" % name[0] + _UNFIT.sub(_code, name[1:])


def _code(match: re.Match[bytes]) -> bytes:
    return b"=%02X" % match[0][0]


def unescape(key: str) -> str:
    """Turn a key that `escape` made into its path; parts that it did not make stay as they are."""
    return "/".join(os.fsdecode(_unescape_part(part.encode())) for part in key.split("/"))


def _unescape_part(part: bytes) -> bytes:
    name = part[1:] if part.startswith(b"_=") else part
    name = _ESCAPED.sub(lambda match: bytes((int(match[1], 16),)), name)
    # One with a slash or a zero byte is never a part's name, nor is one that leads elsewhere.
    made = name not in (b".", b"..") and not _NEVER.search(name) and _escape_part(name) == part
    return name if made else part
