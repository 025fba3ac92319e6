"""Operations of a POSIX store that, together, pass through every system call site."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import kvio
from kvio._native import ffi
from kvio.url import OptionValue
from tests.posix import faultlab

#: What each key must hold after an operation that succeeded (None: nothing), or why it failed.
Outcome: TypeAlias = dict[str, bytes | kvio.KvioError | None]

OLD = faultlab.pattern(1, 5000)
NEW = faultlab.pattern(2, 5000)
LARGE = faultlab.pattern(3, 400_000)
LARGE_OLD = faultlab.pattern(4, 400_000)


class Memory:
    """What a store learned since it was opened, put back so that every run makes the same calls.

    It guesses whether the next key is taken, knows that the umask is kind, which forms of
    publishing the file system lacks, and whether it clones; a fault can teach it the last two.
    """

    def __init__(self, store: kvio.Store) -> None:
        backend: Any = faultlab.posix_backend(store)
        self._engine = backend._engine
        self._publish = backend._engine.publish
        calls = [one.call for one in backend._quick._writes.values()]
        self._calls = [(call, ffi.new("kvio_call *", call[0])) for call in calls]

    def put_back(self, *, expects: bool = False) -> None:
        """Make the store what it was; *expects*: but its last key was taken."""
        self._engine.publish = self._publish
        self._engine.clones = True
        for call, first in self._calls:
            call[0] = first[0]
            call.expect_existing = expects


@dataclass(frozen=True)
class Scenario:
    """One operation on a store in a known state.

    Attributes:
        standing: what every key holds before; None: nothing.
        new: what a write leaves; None: the operation is not a write.
        act: does it, and says what every key must hold afterwards.
        calibrated: hybrid is asked to read direct at any size; the page cache is cold.
        deletes: the operation is a deletion.
        sampled: a few errors are enough, the calls are made elsewhere too.
        fresh: the directories of the keys do not exist yet.
        vanished: they do not, but the store still has them open.
        expected: the store takes its key to be taken, as the last one was.
        of_file: the block is a file at `given`.
    """

    name: str
    act: Callable[[Scenario, kvio.Store], Outcome]
    backend: str = "posix-tmpfile"
    options: dict[str, OptionValue] = field(default_factory=dict)
    keys: tuple[str, ...] = ("a/b",)
    standing: bytes | None = None
    new: bytes | None = NEW
    fresh: bool = False
    vanished: bool = False
    expected: bool = False
    calibrated: bool = False
    umask: int = 0o022
    deletes: bool = False
    sampled: bool = False
    of_file: bool = False

    @property
    def moves(self) -> bool:
        """The store takes the file that it is given."""
        return self.of_file and self.name.startswith("move")

    @property
    def level(self) -> str:
        """What receipts must say."""
        return str(self.options.get("durability", "visible"))

    @property
    def layout(self) -> str:
        """How the store lays out files."""
        return str(self.options.get("layout", "block"))

    @property
    def direct(self) -> bool:
        """The scenario needs direct I/O."""
        return self.backend != "posix-tmpfile"

    def open(self, root: Path) -> kvio.Store:
        """Open the store at *root*."""
        if self.calibrated:
            calibrate(root, direct_from=1)
        return kvio.open_store(
            self.backend,
            root=root,
            io_threads=2,
            options={"segment_bytes": 131072, "chunk_bytes": 131072, **self.options},
        )

    def arrange(self, root: Path, store: kvio.Store | None = None) -> None:
        """Put the file system into the state before the operation, without kvio's code."""
        for key in self.keys:
            path = faultlab.file_of(root, key, layout=self.layout)
            if self.fresh or self.vanished:
                shutil.rmtree(root / path.relative_to(root).parts[0], ignore_errors=True)
                continue
            path.unlink(missing_ok=True)
            if self.standing is not None:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                plain = self.layout == "plain"
                path.write_bytes(self.standing if plain else self._sealed(key))
                path.chmod(0o600)
                if self.calibrated:
                    _forget(path)
        if self.of_file and self.new is not None:
            _make_given(given(root), self.new)
        if self.fresh and store is not None:
            faultlab.engine_of(store).directories.close()

    def _sealed(self, key: str) -> bytes:
        assert self.standing is not None
        return faultlab.seal(self.standing, key)

    def run(self, store: kvio.Store) -> Outcome:
        """Do it under the scenario's umask."""
        with faultlab.umask(self.umask):
            return self.act(self, store)

    def allowed_after_failure(self) -> tuple[bytes | None, ...]:
        """List what a key may hold after a failure or death: the old block or the new, whole."""
        if self.deletes:
            return (self.standing, None)
        return (self.standing,) if self.new is None else (self.standing, self.new)


def _forget(path: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def calibrate(root: Path, *, direct_from: int) -> None:
    """Leave a calibration that reads and writes direct from a size on."""
    steps = [
        {"below_nbytes": direct_from, "mode": "buffered"},
        {"below_nbytes": None, "mode": "direct"},
    ]
    table = {"version": 1, "reason": "a test", "write": {"1": steps}, "read": {"1": steps}}
    (root / ".kvio-calibration.json").write_text(json.dumps(table))


def _write(if_exists: str, memory: Callable[[bytes], memoryview]) -> Callable[..., Outcome]:
    def act(scenario: Scenario, store: kvio.Store) -> Outcome:
        assert scenario.new is not None
        (key,) = scenario.keys
        try:
            receipt = store.write_block(key, memory(scenario.new), if_exists=if_exists)  # type: ignore[arg-type]  # one of three literals
        except kvio.KvioError as exc:
            return {key: exc}
        assert receipt.level == scenario.level
        return {key: scenario.standing if receipt.existed else scenario.new}

    return act


def _stream(if_exists: str, *, known: bool) -> Callable[..., Outcome]:
    """Write bytes that come piece by piece; *known*: how many there will be."""

    def act(scenario: Scenario, store: kvio.Store) -> Outcome:
        assert scenario.new is not None
        (key,) = scenario.keys
        nbytes = len(scenario.new) if known else None
        backend = faultlab.posix_backend(store)
        try:
            receipt = backend.write_stream(
                key,
                io.BytesIO(scenario.new).readinto,
                nbytes=nbytes,
                at_least=1,
                if_exists=if_exists,  # type: ignore[arg-type]  # one of three literals
            )
        except kvio.KvioError as exc:
            return {key: exc}
        assert receipt.level == scenario.level
        assert receipt.nbytes == len(scenario.new)
        return {key: scenario.standing if receipt.existed else scenario.new}

    return act


def given(root: Path) -> Path:
    """Return the path of the file that a scenario stores."""
    return root.parent / "given" / "file"


def _make_given(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.parent.chmod(0o755)  # whatever the scenario's umask
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    path.chmod(0o644)


def _file(if_exists: str, *, move: bool) -> Callable[..., Outcome]:
    """Store a file; after a failure it is as it was, or the block is there."""

    def act(scenario: Scenario, store: kvio.Store) -> Outcome:
        assert scenario.new is not None
        (key,) = scenario.keys
        root = Path(store.url.path or str(store.url.options["root"]))
        path = given(root)
        if not path.exists():  # a run before this one took it
            _make_given(path, scenario.new)
        try:
            receipt = store.write_file(key, path, move=move, if_exists=if_exists)  # type: ignore[arg-type]  # one of three literals
        except kvio.KvioError as exc:
            if path.exists():
                assert path.read_bytes() == scenario.new, "a failure changed the file"
            else:
                assert _is_stored(scenario, root, key), "a failure lost the file"
            return {key: exc}
        assert receipt.level == scenario.level
        assert receipt.nbytes == len(scenario.new)
        assert path.exists() != move
        if not receipt.existed:
            mode = faultlab.file_of(root, key, layout=scenario.layout).stat().st_mode & 0o7777
            assert mode == scenario.options.get("file_mode", 0o600)
        return {key: scenario.standing if receipt.existed else scenario.new}

    return act


def _is_stored(scenario: Scenario, root: Path, key: str) -> bool:
    stored = faultlab.peek(root, key, layout=scenario.layout)
    return stored is not None and stored in (scenario.new, scenario.standing)


def _write_batch(if_exists: str) -> Callable[..., Outcome]:
    def act(scenario: Scenario, store: kvio.Store) -> Outcome:
        assert scenario.new is not None
        items = [(key, scenario.new) for key in scenario.keys]
        outcome: Outcome = {}
        for result in store.write_blocks(items, if_exists=if_exists):  # type: ignore[arg-type]  # one of three literals
            if result.receipt is None:
                assert result.error is not None
                outcome[result.key] = result.error
                continue
            assert result.receipt.level == scenario.level
            kept = result.receipt.existed
            outcome[result.key] = scenario.standing if kept else scenario.new
        return outcome

    return act


def _read(memory: Callable[[bytes], memoryview]) -> Callable[..., Outcome]:
    def act(scenario: Scenario, store: kvio.Store) -> Outcome:
        assert scenario.standing is not None
        (key,) = scenario.keys
        out = memory(bytes(len(scenario.standing)))
        try:
            got = store.read_block_into(key, out)
        except kvio.KvioError as exc:
            return {key: exc}
        assert bytes(out[:got]) == scenario.standing, "wrong bytes were returned as good"
        return {key: scenario.standing}

    return act


def _read_range(scenario: Scenario, store: kvio.Store) -> Outcome:
    assert scenario.standing is not None
    (key,) = scenario.keys
    try:
        got = store.read_block(key, offset=777, nbytes=1500)
    except kvio.KvioError as exc:
        return {key: exc}
    assert bytes(got) == scenario.standing[777:2277], "wrong bytes were returned as good"
    return {key: scenario.standing}


def _read_batch(scenario: Scenario, store: kvio.Store) -> Outcome:
    assert scenario.standing is not None
    items = [(key, bytearray(len(scenario.standing))) for key in scenario.keys]
    outcome: Outcome = {}
    for result, (key, out) in zip(store.read_blocks_into(items), items, strict=True):
        assert result.error is not None or bytes(out) == scenario.standing
        outcome[key] = result.error or scenario.standing
    return outcome


def _stat(scenario: Scenario, store: kvio.Store) -> Outcome:
    assert scenario.standing is not None
    (key,) = scenario.keys
    try:
        stat = store.stat_block(key)
    except kvio.KvioError as exc:
        return {key: exc}
    assert stat.nbytes == len(scenario.standing)
    return {key: scenario.standing}


def _verify(scenario: Scenario, store: kvio.Store) -> Outcome:
    (key,) = scenario.keys
    try:
        result = store.verify_block(key)
    except kvio.KvioError as exc:
        return {key: exc}
    return {key: result.error or scenario.standing}


def _delete(scenario: Scenario, store: kvio.Store) -> Outcome:
    (key,) = scenario.keys
    try:
        assert store.delete_block(key)
    except kvio.KvioError as exc:
        return {key: exc}
    return {key: None}


#: Three keys, two of them in one directory of ``layout=block``.
_BATCH = ("k1", "k92", "k0")
_DURABLE: dict[str, OptionValue] = {"durability": "durable"}
_RENAME: dict[str, OptionValue] = {"publish": "rename"}
_PLAIN: dict[str, OptionValue] = {"layout": "plain"}
_SHARED: dict[str, OptionValue] = {"file_mode": 0o640, "dir_mode": 0o750, "group": os.getegid()}
_HERE = memoryview
_OUT = faultlab.unaligned

SCENARIOS = (
    Scenario("write new, buffered", _write("keep", _HERE)),
    Scenario("write new, exclusive", _write("error", _HERE)),
    Scenario("write new into a fresh directory", _write("keep", _HERE), fresh=True),
    Scenario("write new into a vanished directory", _write("keep", _HERE), vanished=True),
    Scenario("replace into a vanished directory", _write("replace", _HERE), vanished=True),
    Scenario(
        "write by rename into a vanished directory",
        _write("replace", _HERE),
        options=_RENAME,
        vanished=True,
        sampled=True,
    ),
    Scenario("write new, hostile umask", _write("keep", _HERE), fresh=True, umask=0o777),
    Scenario("write new for a group", _write("keep", _HERE), fresh=True, options=_SHARED),
    Scenario("write new, direct", _write("keep", faultlab.aligned), "posix-direct", new=LARGE),
    Scenario("write new, direct, bounced", _write("keep", faultlab.unaligned), "posix-direct"),
    Scenario(
        "write new, direct, segments",
        _write("keep", faultlab.unaligned),
        "posix-direct",
        new=LARGE,
    ),
    Scenario("stream", _stream("keep", known=False), new=LARGE),
    Scenario("stream of known length", _stream("keep", known=True), new=LARGE, sampled=True),
    Scenario(
        "stream, kept", _stream("keep", known=False), standing=LARGE_OLD, new=LARGE, sampled=True
    ),
    Scenario(
        "stream, replaced, direct",
        _stream("replace", known=False),
        "posix-direct",
        standing=OLD,
        new=LARGE,
        sampled=True,
    ),
    Scenario(
        "stream, durable, by rename",
        _stream("error", known=False),
        options=_DURABLE | _RENAME,
        new=LARGE,
        sampled=True,
    ),
    Scenario(
        "stream, durable", _stream("keep", known=True), options=_DURABLE, new=LARGE, sampled=True
    ),
    Scenario(
        "stream into a vanished directory",
        _stream("keep", known=False),
        new=LARGE,
        vanished=True,
        sampled=True,
    ),
    Scenario("move", _file("keep", move=True), of_file=True),
    Scenario("move, exclusive, plain", _file("error", move=True), options=_PLAIN, of_file=True),
    Scenario("move, kept", _file("keep", move=True), standing=OLD, of_file=True),
    Scenario("move, replaced", _file("replace", move=True), standing=OLD, of_file=True),
    Scenario(
        "move, over a shorter block", _file("keep", move=True), standing=OLD[:9], of_file=True
    ),
    Scenario("move, durable", _file("keep", move=True), options=_DURABLE, of_file=True),
    Scenario(
        "move, durable, kept",
        _file("keep", move=True),
        options=_DURABLE,
        standing=OLD,
        of_file=True,
        sampled=True,
    ),
    Scenario(
        "move, durable, replaced",
        _file("replace", move=True),
        "posix-direct",
        options=_DURABLE | _PLAIN,
        standing=OLD,
        of_file=True,
    ),
    Scenario("move for a group", _file("keep", move=True), options=_SHARED, of_file=True),
    Scenario(
        "move, hostile umask", _file("keep", move=True), fresh=True, umask=0o777, of_file=True
    ),
    Scenario(
        "move into a vanished directory",
        _file("keep", move=True),
        vanished=True,
        of_file=True,
        sampled=True,
    ),
    Scenario("clone or copy", _file("keep", move=False), new=LARGE, of_file=True),
    Scenario(
        "clone or copy, durable, replaced",
        _file("replace", move=False),
        options=_DURABLE | _RENAME,
        standing=OLD,
        of_file=True,
        sampled=True,
    ),
    Scenario("replace", _write("replace", _HERE), standing=OLD),
    Scenario(
        "replace, direct, segments",
        _write("replace", faultlab.unaligned),
        "posix-direct",
        standing=LARGE_OLD,
        new=LARGE,
        sampled=True,
    ),
    Scenario("keep over an existing block", _write("keep", _HERE), standing=OLD),
    Scenario("keep over one more", _write("keep", _HERE), standing=OLD, expected=True),
    Scenario("keep over a shorter block", _write("keep", _HERE), standing=OLD[:999]),
    Scenario("write durable", _write("keep", _HERE), options=_DURABLE | _PLAIN),
    Scenario("keep durable", _write("keep", _HERE), options=_DURABLE | _PLAIN, standing=OLD),
    Scenario(
        "replace durable", _write("replace", _HERE), options=_DURABLE, standing=OLD, sampled=True
    ),
    Scenario(
        "write durable, fresh directories",
        _write("keep", _HERE),
        options=_DURABLE | _PLAIN,
        keys=("x/y/z",),
        fresh=True,
        sampled=True,
    ),
    Scenario("batch", _write_batch("keep"), keys=_BATCH),
    Scenario("batch replaced", _write_batch("replace"), keys=_BATCH, standing=OLD, sampled=True),
    Scenario("batch durable", _write_batch("keep"), options=_DURABLE, keys=_BATCH, sampled=True),
    Scenario(
        "batch durable, kept",
        _write_batch("keep"),
        options=_DURABLE,
        keys=_BATCH,
        standing=OLD,
        sampled=True,
    ),
    Scenario("write by rename", _write("keep", _HERE), options=_RENAME),
    Scenario("write by rename, exclusive", _write("error", _HERE), options=_RENAME),
    Scenario("replace by rename", _write("replace", _HERE), options=_RENAME, standing=OLD),
    Scenario("batch by rename", _write_batch("keep"), options=_RENAME, keys=_BATCH, sampled=True),
    Scenario(
        "batch durable by rename",
        _write_batch("keep"),
        options=_RENAME | _DURABLE,
        keys=_BATCH,
        sampled=True,
    ),
    Scenario("write plain", _write("keep", _HERE), options=_PLAIN),
    Scenario(
        "write plain, direct",
        _write("replace", faultlab.unaligned),
        "posix-direct",
        options=_PLAIN,
        standing=OLD,
        sampled=True,
    ),
    Scenario("read", _read(_OUT), standing=OLD, new=None),
    Scenario("read larger", _read(_OUT), standing=LARGE, new=None),
    Scenario("read plain", _read(_OUT), options=_PLAIN, standing=OLD, new=None),
    Scenario(
        "read direct",
        _read(faultlab.aligned),
        "posix-direct",
        standing=LARGE,
        new=None,
        sampled=True,
    ),
    Scenario("read direct, bounced", _read(_OUT), "posix-direct", standing=OLD, new=None),
    Scenario("read direct, segments", _read(_OUT), "posix-direct", standing=LARGE, new=None),
    Scenario("read hybrid", _read(_OUT), "hybrid", standing=OLD, new=None, calibrated=True),
    Scenario("read a range", _read_range, standing=OLD, new=None),
    Scenario(
        "read a range, direct", _read_range, "posix-direct", standing=OLD, new=None, sampled=True
    ),
    Scenario("read a batch", _read_batch, keys=_BATCH, standing=OLD, new=None),
    Scenario("stat", _stat, standing=OLD, new=None),
    Scenario("verify", _verify, standing=LARGE, new=None),
    Scenario("delete", _delete, standing=OLD, new=None, deletes=True),
    Scenario(
        "delete durable", _delete, options=_DURABLE | _PLAIN, standing=OLD, new=None, deletes=True
    ),
)
