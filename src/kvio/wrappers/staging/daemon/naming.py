"""The name of a store that a daemon and its clients must agree on."""

from __future__ import annotations

import os
from typing import Final

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
