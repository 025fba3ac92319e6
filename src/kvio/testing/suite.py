"""The whole contract of a backend: subclass `BackendTests`, define `open`, run pytest."""

from __future__ import annotations

from kvio.testing.as_files import FileTests
from kvio.testing.batches import BatchTests
from kvio.testing.closing import ClosingTests
from kvio.testing.damaged import DamageTests
from kvio.testing.hooks import BackendHooks, Damage
from kvio.testing.looking import LookingTests
from kvio.testing.reading import ReadingTests
from kvio.testing.sharing import SharingTests
from kvio.testing.submitted import SubmittedTests
from kvio.testing.writing import WritingTests

__all__ = ["BackendHooks", "BackendTests", "Damage"]


class BackendTests(
    WritingTests,
    ReadingTests,
    LookingTests,
    FileTests,
    BatchTests,
    DamageTests,
    SubmittedTests,
    SharingTests,
    ClosingTests,
):
    """Everything a store over any backend must do.

    Define `open`, and as many of the ``raw_`` hooks as the storage allows::

        class TestMine(BackendTests):
            def open(self, tmp_path):
                return f"mine://{tmp_path}"
    """
