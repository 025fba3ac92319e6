"""Five S3 libraries behind kvio, by hand and as a newcomer calls them, against a raw client.

Each load runs in a process of its own (`client`), begun by `fleet`; `experiment` is the entry.
"""

from __future__ import annotations
