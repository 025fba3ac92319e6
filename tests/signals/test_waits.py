"""A signal ends a wait for what was queued, and the wait may be begun again."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvio
from tests.signals.programs import Traced

#: What waits for its drive: enough for a signal to come in the middle.
OPEN = """
store = kvio.open_store(
    "posix-tmpfile", root=root, durability="durable", layout="plain", io_threads=1
)
send_when(lambda: published() >= 10)
"""


@pytest.fixture
def root(real_disk: Path) -> Path:
    """A root directory on a disk that makes blocks durable."""
    path = real_disk / "root"
    path.mkdir(mode=0o700)
    try:
        kvio.open_store("posix-tmpfile", root=path, durability="durable", layout="plain").close()
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's medium is not durable: {exc}")
    return path


@pytest.fixture
def slow_syncs(tmp_path: Path) -> Traced:
    """Programs whose every fdatasync takes 20 ms longer."""
    return Traced(tmp_path / "log", "fdatasync:delay_exit=20000")


@pytest.mark.slow
def test_a_store_whose_close_was_interrupted_can_be_closed_again(
    root: Path, slow_syncs: Traced
) -> None:
    """Nothing that was submitted is lost, and the second close waits for it."""
    facts = slow_syncs.run(
        OPEN
        + """
futures = [store.submit_write(f"k{n}", b"data") for n in range(100)]
try:
    store.close()
except Stop:
    interrupted = sum(future.done() for future in futures)
    store.close()
report(interrupted=interrupted, names=len(names()), done=sum(f.done() for f in futures))
""",
        root,
    )

    assert facts["interrupted"] < 100
    assert facts["names"] == facts["done"] == 100


@pytest.mark.slow
def test_a_tier_whose_close_was_interrupted_stays_open(root: Path, slow_syncs: Traced) -> None:
    """It takes another write, and the next close stores everything."""
    facts = slow_syncs.run(
        OPEN
        + """
tier = kvio.stage(store, "1MiB", drain_threads=1)
tier.pause()
receipts = [tier.write_block(f"k{n}", bytes(600)) for n in range(200)]
try:
    tier.close()
except Stop:
    interrupted = sum(receipt.done for receipt in receipts)
    tier.write_block("again", b"data")
    tier.close()
store.close()
report(interrupted=interrupted, names=len(names()))
""",
        root,
    )

    assert facts["interrupted"] < 200
    assert facts["names"] == 201


@pytest.mark.slow
def test_a_shared_file_whose_close_was_interrupted_writes_no_more(
    root: Path, tmp_path: Path
) -> None:
    """Queued writes of an unfinished file are dropped; those under way end first."""
    traced = Traced(tmp_path / "log", "pwritev2:delay_exit=30000")
    facts = traced.run(
        """
data = bytes(1 << 20)
file = kvio.SharedFile.create(f"{root}/file", 100 << 20, io_threads=1)
futures = [file.submit_pwrite(data, n << 20) for n in range(100)]
send_when(lambda: futures[5].done())
try:
    file.close()
except Stop:
    report(cancelled=sum(future.cancelled() for future in futures))
""",
        root,
    )

    assert facts["cancelled"] > 0
    assert traced.calls("pwritev2") <= 101 - facts["cancelled"]
