"""DLIO's own metrics of kvio's backends, beside those of its stock ``local_fs``.

Every turn is the unmodified ``dlio_benchmark`` command in a directory of its own, and what it
stored is compared byte by byte with what stock DLIO stores.
"""

from __future__ import annotations
