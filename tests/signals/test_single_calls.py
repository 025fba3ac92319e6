"""A signal ends a call on one large block between two system calls."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvio
from tests.signals.programs import Traced


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["posix-tmpfile", "posix-direct"])
def test_an_interrupted_write_of_a_large_block_leaves_nothing(
    root: Path, tmp_path: Path, backend: str
) -> None:
    """By one thread and by several: no block, no temporary, no descriptor, and most not written."""
    traced = Traced(tmp_path / "log", "pwritev2:delay_exit=30000")
    facts = traced.run(
        f"""
try:
    store = kvio.open_store(
        "{backend}", root=root, layout="plain", options={{"publish": "rename"}}, io_threads=2
    )
except kvio.UnsupportedError as exc:
    report(unsupported=str(exc))
    sys.exit()
data = memoryview(bytearray(400 << 20))[1:]
store.contains("large")  # which opens the directory
before = descriptors()
send_when(names)
try:
    store.write_block("large", data)
except Stop:
    report(names=names(), descriptors=descriptors() - before)
""",
        root,
    )

    if "unsupported" in facts:
        pytest.skip(facts["unsupported"])
    assert facts["names"] == []
    assert facts["descriptors"] == 0
    assert traced.calls("pwritev2") < 100


@pytest.mark.slow
@pytest.mark.parametrize("call", ["read_block_into('large', out)", "verify_block('large')"])
def test_an_interrupted_read_of_a_large_block_ends(root: Path, tmp_path: Path, call: str) -> None:
    """Neither a read nor a check goes on to the end of its block."""
    with kvio.open_store("posix-tmpfile", root=root, layout="plain") as store:
        store.write_block("large", bytes(100 << 20))
    with kvio.open_store("posix-tmpfile", root=root, layout="block") as store:
        store.write_block("large", bytes(100 << 20))
    traced = Traced(tmp_path / "log", "preadv2:signal=USR1:delay_exit=40000:when=3+")
    facts = traced.run(
        f"""
store = kvio.open_store("posix-tmpfile", root=root)
store.contains("large")  # which opens the directory
before = descriptors()
out = bytearray(100 << 20)
try:
    store.{call}
except Stop:
    report(descriptors=descriptors() - before)
""",
        root,
    )

    assert facts["descriptors"] == 0
    assert traced.calls("preadv2") < 20


@pytest.mark.slow
def test_an_interrupted_check_of_a_existing_block_is_no_reason_to_replace_it(
    root: Path, tmp_path: Path
) -> None:
    """A durable ``keep`` reads the block that stands from the disk: cut short, it writes none."""
    try:
        store = kvio.open_store("posix-tmpfile", root=root, durability="durable", layout="plain")
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system is not durable: {exc}")
    with store:
        store.write_block("large", bytes(100 << 20))
    traced = Traced(
        tmp_path / "log", "preadv2:signal=USR1:delay_exit=2000:when=20+", "pwritev2:delay_exit=1"
    )
    facts = traced.run(
        """
store = kvio.open_store("posix-tmpfile", root=root, durability="durable", layout="plain")
data = bytes(100 << 20)
inode = os.stat(f"{root}/large").st_ino
try:
    store.write_block("large", data)
except Stop:
    report(names=names(), same=os.stat(f"{root}/large").st_ino == inode)
""",
        root,
    )

    assert facts == {"names": ["large"], "same": True}
    assert traced.calls("preadv2") < 300
    assert traced.calls("pwritev2") < 10  # those of the probe of the root
