"""Does this server honour If-None-Match, or does it only say so?"""

from __future__ import annotations

import secrets
import threading
from typing import Final

from kvio.errors import BlockExistsError, KvioError
from kvio.s3.asking import Asking, run_in_turn
from kvio.s3.objects import Objects
from kvio.s3.options import S3Options

_PROBE: Final = ".kvio-probe-"


class Conditions:
    """Whether conditional writes can be relied on; found out once, when it is first needed."""

    def __init__(self, options: S3Options, ask: Asking) -> None:
        self._options = options
        self._ask = ask
        self._lock = threading.Lock()
        self._known: bool | None = {"trust": True, "off": False}.get(options.conditional)

    def hold(self, objects: Objects) -> bool:
        """Tell whether the server refuses a second conditional write of one name."""
        if not objects.traits.conditional:
            return False
        with self._lock:
            if self._known is None:
                self._known = self._try(objects)
            return self._known

    def _try(self, objects: Objects) -> bool:
        name = f"{self._options.name_prefix}{_PROBE}{secrets.token_hex(16)}"

        def put() -> None:
            self._ask(
                lambda: objects.put(
                    name, [memoryview(b"?")], crc32c=None, only_new=True, run_all=run_in_turn
                ),
                "probe the server",
                once_only=True,
            )

        try:
            put()
            put()
        except BlockExistsError:
            return True
        except KvioError:
            return False  # it refuses the header, or us: then nothing is promised
        finally:
            self._ask(lambda: objects.delete(name), "remove the probe")
        return False
