"""What is asked of the outcome of a cell, and what of it is counted."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tests.faults.s3.faults import CHANGED_ABOVE, HANGING, PASSING, Fault
from tests.faults.s3.operations import OPERATIONS, UNDECIDED
from tests.s3.failing import BUCKET, PREFIX, stored
from tests.s3.rawsig import RawS3

#: So long a library has to give up an upload, once it has said that it failed.
GIVING_UP_S: Final = 10.0
#: How much later than its own timeouts an operation may end on a machine that is busy.
SLACK_S: Final = 6.0
#: The one error of a clock that is wrong.
DENIED: Final = "AccessDeniedError"
#: obstore gives up an upload while other parts are on their way, which these servers then keep;
#: it reveals the upload's name to no one, so no one else can abort it.
KEEPS_LATE_PARTS: Final = {"s3+obstore": ("minio", "versitygw")}


class Cell(NamedTuple):
    """One block of one operation, and the fault that was armed.

    Attributes:
        how: ``always``, or ``once`` and after how many requests.
        outcome: ``good``, ``bad``, or the error's name.
        met: the requests that met the fault.
        limit_s: when it should have ended at the latest, by its timeouts; None: they are long.
        took_s: when it did.
    """

    library: str
    server: str
    fault: Fault
    operation: str
    key: str
    how: str
    outcome: str
    met: Sequence[str]
    limit_s: float | None = None
    took_s: float = 0.0

    @property
    def once(self) -> bool:
        """Whether the fault passed."""
        return not self.how.startswith("always")


@dataclass(slots=True)
class Told:
    """What was counted, and what went against the contract.

    Attributes:
        met: how many requests each fault changed, by its name.
        lost: receipts of what is not there.
        torn: blocks and answers that are in part, or not what was stored.
    """

    cells: int = 0
    requests: int = 0
    lost: int = 0
    torn: int = 0
    met: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def judge(self, cell: Cell, raw: RawS3) -> None:
        """Count a cell, and say what is wrong with it."""
        self.cells += 1
        name = f"{cell.fault.name} | {cell.operation} | {cell.how}"
        self.outcomes[name] = cell.outcome
        for verdict, complaint in complaints(cell, raw):
            self.lost += verdict == "lost"
            self.torn += verdict == "torn"
            where = f"{cell.library} at {cell.server} | {name}"
            self.wrong.append(f"{where}: {cell.outcome}: {complaint}")

    def plain(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return {name: getattr(self, name) for name in Told.__slots__}


def complaints(cell: Cell, raw: RawS3) -> Iterator[tuple[str, str]]:
    """Yield what of a cell goes against the contract, and what that is counted as."""
    what, outcome, fault = OPERATIONS[cell.operation], cell.outcome, cell.fault.name
    if outcome == "bad" and not nobody_can_tell(cell):
        yield "torn", "what came is not what was stored"
    if outcome.startswith("untyped"):
        yield "", "this is no error of kvio's"
    if what.writes:
        yield from _about_writes(cell, raw)
    if what.deletes and outcome == "good" and raw.head(BUCKET, f"{PREFIX}/{cell.key}"):
        yield "", "it is still there"
    if cell.once and fault in PASSING and cell.operation != UNDECIDED and outcome != "good":
        yield "", "a retry would have made it good"
    if fault in HANGING and not cell.once and cell.met and outcome != "StorageTimeoutError":
        yield "", "it was no timeout"
    if fault == "clock skew" and cell.met and outcome not in ("good", DENIED):
        yield "", "it was not denied"
    if cell.limit_s is not None and cell.took_s > cell.limit_s + SLACK_S:
        yield "", f"it ended after {cell.took_s:.1f} s, not {cell.limit_s:.1f}"


def _about_writes(cell: Cell, raw: RawS3) -> Iterator[tuple[str, str]]:
    found = raw.get(BUCKET, f"{PREFIX}/{cell.key}")
    whole = stored(cell.key, OPERATIONS[cell.operation].data)
    if cell.outcome == "good" and found != whole:
        yield "lost", f"a receipt, and {'nothing' if found is None else 'something else'} is there"
    # A body that is flipped on its way is whole, and wrong: its checksum says so to its reader.
    if found not in (None, whole) and cell.fault.name != CHANGED_ABOVE:
        yield "torn", f"{len(found or b'')} of {len(whole)} bytes are there"
    taken = cell.outcome == "BlockExistsError" and cell.fault.name != "delivered twice"
    if cell.operation == UNDECIDED and taken:
        yield "", "it names another writer, and there was none"
    if not has_no_name(cell) and _unfinished(cell, raw):
        yield "", "an upload was left unfinished"


def has_no_name(cell: Cell) -> bool:
    """Return whether nobody is left who could give up an upload, or whoever tried was not heard.

    The answer to its beginning was lost, or the beginning was delivered twice, or the fault has
    met what gives it up; and see `KEEPS_LATE_PARTS`.
    """
    begun = any("?uploads" in one for one in cell.met) and not cell.fault.before
    given_up = any(one.startswith("DELETE") for one in cell.met)
    late = cell.server in KEEPS_LATE_PARTS.get(cell.library, ())
    parts = late and any("partNumber=" in one for one in cell.met)
    return begun or given_up or parts


def _unfinished(cell: Cell, raw: RawS3) -> bool:
    turn, deadline = threading.Event(), time.monotonic() + GIVING_UP_S
    while left := raw.list_uploads(BUCKET, f"{PREFIX}/{cell.key}"):
        if time.monotonic() > deadline:
            break
        turn.wait(0.05)
    return bool(left)


def nobody_can_tell(cell: Cell) -> bool:
    """Return whether bytes that are not what was stored can be noticed by nobody.

    S3 sends no checksum with a range: what changes there on its way down is noticed in the
    trailer, and not in what lies before it. Of a trailer that is none `contains` says so, wherever
    it was damaged. And s3dlio takes a listing that ends early, or is no XML, for all of it.
    """
    fault = cell.fault.name
    if fault == "body changed on the way down" and cell.operation == "read a range":
        return True
    if fault not in ("body changed on the way down", "body shortened"):
        return False
    lists = cell.operation in ("list", "list pages")
    return cell.operation == "contains" or (lists and cell.library == "s3+s3dlio")
