"""What kvio can do on each file system, and what hybrid chooses there: doctor and tune on all.

The file systems are made for it and gone afterwards: on loop devices, in memory, and layered over
ext4. Needs root; what cannot be created here is left out, and the notes say what is missing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import kvio
from benchmarks.harness.filesystems import KINDS, ROOM_BYTES, finish, fresh_file_system
from benchmarks.harness.measure import Sample
from benchmarks.harness.plot import size_text
from benchmarks.harness.run import Limits, Run, Scenario, check_names, check_room, workplace
from benchmarks.harness.table import Table
from kvio import GiB, KvioError, UnsupportedError

SCENARIO: Final = Scenario(
    name="media",
    title="What kvio can do on each file system, and what hybrid chooses there",
    reference="",
    contenders=tuple(KINDS),
)
#: Rounds below which `kvio tune` keeps the default for a size.
TUNE_ROUNDS: Final = 3

#: The share of the budget that tuning takes; the rest is for making and looking.
_TUNING: Final = 0.8
#: The command without its script, which need not be on the path.
_KVIO: Final = (
    *(sys.executable, "-P", "-c"),
    "import sys; from kvio.cli import main; sys.exit(main())",
)
#: bindfs(1), --forward-odirect: without it O_DIRECT is cleared.
_FUSE_NOTE: Final = (
    "NOT COMPARABLE: bindfs accepts O_DIRECT and does not pass it on: what is direct, or a cold "
    "read, above it goes through the page cache of the ext4 below"
)
_CALIBRATION: Final = ".kvio-calibration.json"
_HEADINGS: Final = (
    *("file system", "O_TMPFILE", "linkat", "direct I/O", "dontcache", "cachestat", "durable"),
    *("publish", "recommended", "hybrid writes", "hybrid cold reads", "sizes measured"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The findings about one file system.

    Attributes:
        kind: its name in `KINDS`.
        doctor: what ``kvio doctor --json`` printed.
        publish, notes: of a hybrid store's capabilities.
        calibration: the file that ``kvio tune`` wrote; None where there is nothing to choose, or
            where it failed.
    """

    kind: str
    doctor: dict[str, Any]
    publish: str
    notes: Sequence[str]
    calibration: dict[str, Any] | None

    def row(self) -> tuple[str, ...]:
        """Return the cells below `_HEADINGS`."""
        findings = {finding["name"]: finding for finding in self.doctor["findings"]}
        links = ("descriptor", "/proc")
        forms = [form for form in links if findings[f"linkat, by {form}"]["good"]]
        direct, durable = findings["direct I/O"], findings["durable writes"]
        return (
            KINDS[self.kind],
            findings["O_TMPFILE"]["answer"],
            " or ".join(forms) or "no",
            f"yes: {findings['direct alignment']['answer']}" if direct["good"] else _no(direct),
            findings["dontcache"]["answer"],
            findings["cachestat"]["answer"],
            "yes" if durable["good"] else _no(durable),
            self.publish,
            str(self.doctor["url"]).partition(":")[0],
            *self._choice(tunable=direct["good"]),
        )

    def _choice(self, *, tunable: bool) -> tuple[str, str, str]:
        if not tunable:
            return ("always buffered", "always buffered", "nothing to tune")
        if self.calibration is None:
            return ("default", "default", "tune failed")
        cells = self.calibration["measured"]["cells"]
        enough = sum(cell["rounds"] >= TUNE_ROUNDS for cell in cells)
        write, read = (thresholds(self.calibration[verb]) for verb in ("write", "read"))
        return (write, read, f"{enough} of {len(cells)}")


def run(limits: Limits, *, kinds: Sequence[str] = tuple(KINDS)) -> int:
    """Create each file system, run doctor and tune on it, and print and write their findings.

    Args:
        limits: images are made in ``root``; most of ``budget_s`` goes to tuning, in equal parts;
            one tuning writes ``max_rounds`` times ``max_bytes`` at most.
        kinds: names of `KINDS`.

    Returns:
        The exit status: 0; 1 if doctor or tune failed; 130 after Ctrl-C; 2 without any row.

    Raises:
        ConfigError: an unknown kind, or the disk has no room.
    """
    check_names("file system", kinds, KINDS)
    check_room(limits.root, 0 if set(kinds) == {"tmpfs"} else ROOM_BYTES)
    this = Run(SCENARIO, replace(limits, max_rounds=1), {"kinds": list(kinds)})
    with workplace(limits) as base:
        tuned = max(1, len(set(kinds) - {"tmpfs"}))  # memory has nothing to tune
        tune_s = max(1.0, _TUNING * limits.budget_s / tuned)
        tour = _Tour(base, this, limits, tune_s)
        this.take_trials(["doctor and tune"], kinds, tour.visit)
    for kind, why in this.left_out.items():
        sys.stderr.write(f"LEFT OUT: {kind}: {why}\n")
    for failure in this.failed:
        sys.stderr.write(f"{failure}\n")
    if not tour.found:
        return this.status()
    rows = [found.row() for found in tour.found]
    table = Table(title="file systems", headings=_HEADINGS, rows=rows)
    more = {
        "media": tour.found,
        "table": [dict(zip(_HEADINGS, row, strict=True)) for row in rows],
    }
    return this.finish(_notes(kinds, tour), lambda *_: [table], None, more=more)


def thresholds(levels: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Describe one table of a calibration file: by number of blocks at once, if it matters.

    Like "direct from 2 MiB", where all below is buffered; "always buffered"; "dontcache below
    64 KiB, direct from 64 KiB".
    """
    words = {int(level): _steps(steps) for level, steps in levels.items()}
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return "; ".join(
        f"{text} ({'one at a time' if level == 1 else f'{level} at once'})"
        for level, text in sorted(words.items())
    )


def _steps(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return which mode begins where; above the last limit a calibration means buffered."""
    begins: list[tuple[int, str]] = []
    start: int | None = 0
    for step in (*steps, {"below_nbytes": None, "mode": "buffered"}):
        if start is None:
            break
        if not begins or begins[-1][1] != step["mode"]:
            begins.append((start, step["mode"]))
        start = step["below_nbytes"]
    (_, first), *later = begins
    if not later:
        return f"always {first}"
    below = [] if first == "buffered" else [f"{first} below {size_text(later[0][0])}"]
    return ", ".join([*below, *(f"{mode} from {size_text(nbytes)}" for nbytes, mode in later)])


def _no(finding: Mapping[str, Any]) -> str:
    """Return doctor's refusal with its reason, where there is one."""
    reason = str(finding["meaning"]).partition(" does not open here: ")[2].rstrip(".")
    return f"no: {reason}" if reason else str(finding["answer"])


@dataclass(slots=True)
class _Tour:
    """Visits one file system after the other and keeps what it finds."""

    base: Path
    this: Run
    limits: Limits
    tune_s: float
    found: list[Found] = field(default_factory=list)

    def visit(self, _: str, kind: str, index: int) -> Iterable[Sample]:  # noqa: ARG002  # one round
        """Create one, test it and remove it.

        Raises:
            UnsupportedError: it cannot be made here.
        """
        work = self.base / kind
        work.mkdir()
        try:
            with fresh_file_system(kind, work) as root:
                self._look(kind, root)
        except UnsupportedError as exc:
            raise UnsupportedError(self._shown(exc)) from exc
        except KvioError as exc:
            self.this.failed.append(f"FAILED: {kind}: {self._shown(exc)}")
        return ()

    def _look(self, kind: str, root: Path) -> None:
        doctor = json.loads(self._shown(_run_kvio("doctor", str(root), "--json")))
        with kvio.open_store("hybrid", root=root) as store:
            can = store.capabilities
        calibration = self._tune(kind, root) if can.direct_io else None
        self.this.findings += 1
        self.found.append(
            Found(
                kind=kind,
                doctor=doctor,
                publish=can.publish,
                notes=[self._shown(note) for note in can.notes],
                calibration=calibration,
            )
        )

    def _tune(self, kind: str, root: Path) -> dict[str, Any] | None:
        self.this.progress.say(f"{KINDS[kind]}: tuning for {self.tune_s:.0f} s")
        most = self.limits.max_bytes * self.limits.max_rounds
        try:
            _run_kvio(
                "tune", str(root), "--budget", f"{self.tune_s:.1f}s", "--max-bytes", str(most)
            )
        except KvioError as exc:
            self.this.failed.append(f"FAILED: {kind}: {self._shown(exc)}")
            return None
        content: dict[str, Any] = json.loads((root / _CALIBRATION).read_text())
        return content

    def _shown(self, text: object) -> str:
        """Leave out the directory, which is gone when the text is read."""
        return str(text).replace(str(self.base), "…")


def _run_kvio(*arguments: str) -> str:
    status, said, complaint = finish((*_KVIO, *arguments))
    if status:
        raise KvioError(f"kvio {arguments[0]} ended with {status}: {complaint}")
    return said


def _notes(kinds: Sequence[str], tour: _Tour) -> list[str]:
    return [
        f"{len(tour.found)} of {len(kinds)} file systems tested, each "
        f"{ROOM_BYTES / GiB:.0f} GiB and empty; where it is on a disk, an image file on a loop "
        "device with direct I/O to the image: not what the disk itself would give",
        f"hybrid: after {tour.tune_s:.0f} s of kvio tune; a block size measured in fewer than "
        f"{TUNE_ROUNDS} rounds keeps the default (writes direct from 2 MiB, cold reads from "
        "64 KiB)",
        "hot reads are buffered, whatever the table says of cold ones",
        "as root: linkat by descriptor asks others for CAP_DAC_READ_SEARCH before Linux 6.10",
        *(f"{KINDS[found.kind]}: {note}" for found in tour.found for note in found.notes),
        *(
            f"{KINDS[found.kind]}: the page cache could not be emptied; reads keep the default"
            for found in tour.found
            if found.calibration and not found.calibration["measured"]["cold_reads"]
        ),
        *(f"{KINDS[f.kind]}: {_FUSE_NOTE}" for f in tour.found if f.kind == "fuse"),
    ]
