"""Which tests may end otherwise in a world that lacks something, and how they end then."""

from __future__ import annotations

import re
from typing import Final

_NEWER: Final = r"needs cachestat|needs RWF_DONTCACHE"
_ROOM: Final = r"needs \d+ GiB"
#: Reasons for which a test may be skipped that passes in the plain world, by world.
LACKING: Final = {
    "O_TMPFILE and newer": _NEWER,
    "newer calls": _NEWER,
    "vectored": _NEWER,
    "root": r"needs root|needs fanotify|losetup|mount",
    "a disk: tmpfs": rf"tmpfs has no durable|durable' on|not a disk|tmpfs accepts|{_ROOM}",
    "a disk: FUSE": rf"fuse|FUSE|{_NEWER}|{_ROOM}",
    "a disk: overlay": rf"overlay|{_NEWER}|{_ROOM}",
    "proc": r"needs fanotify|losetup|mount|/proc",
}
_TRACED: Final = (
    "test_the_kernel_sees_the_publish_protocol",
    "test_a_descriptor_that_failed_is_never_synced_again",
)
#: They look for O_TMPFILE or linkat, as calls or as sites; the last counts the inodes of a tmpfs,
#: where a link, which stands in for renameat2's flags, takes one more.
_NAMED: Final = (
    *_TRACED,
    "test_a_batch_shares_directory_syncs",
    "test_a_failed_link_syncs_no_directory",
    "test_bytes_that_failed_to_sync_are_written_anew",
    "test_exhausted_inodes_fail_typed",
)
#: cachestat(2) sees no page of a file on overlayfs; our server's drop theirs when they are opened.
_CACHED: Final = (
    "test_buffered_writes_fill_the_page_cache",
    "test_hybrid_writes_by_size",
    "test_hybrid_reads_direct_what_is_cold",
    "test_hybrid_brings_to_the_cache_what_is_read_twice",
    "test_what_the_cache_did_not_keep_is_read_direct_again",
    "test_hybrid_reads_what_is_hot_from_the_cache",
)
_EVERY: Final = ()
_ANYHOW: Final = ""
#: They list their descriptors by /proc, bind by it, unmount, or let strace name descriptors.
_BY_PROC: Final = (_EVERY, r"/proc/self|umount|resource busy|nobody syncs the name")
#: Our server makes no FIFOs and sockets, owns what users make, and knows no removed directories.
_BY_SERVER: Final = (_EVERY, r"Function not implemented|make root .* Operation not permitted")
_REMOVED: Final = (("test_a_root_that_vanishes_fails_typed",), r"TransientStorageError: .*ESTALE")
#: It goes by paths: what is opened while a name changes hands has the length of the file before.
_BY_PATH: Final = (("test_readers_see_all_of_one_length",), r"CorruptBlockError: .*truncated")
#: Tests that may fail, because a world takes their own means away: their functions, and how they
#: end then.
SUBJECTS: Final[dict[str, tuple[tuple[tuple[str, ...], str], ...]]] = {
    "O_TMPFILE": ((_NAMED, _ANYHOW),),
    "links": ((_NAMED, _ANYHOW),),
    "a disk: FUSE": (((*_NAMED, *_CACHED), _ANYHOW), _BY_SERVER, _REMOVED, _BY_PATH),
    "a disk: overlay": (((*_NAMED, *_CACHED), _ANYHOW),),
    # Another user's strace may not look at the interpreter.
    "root": (((*_TRACED, "test_a_new_root_is_synced_in_its_parent"), r"strace: "),),
    "proc and AT_EMPTY_PATH": (_BY_PROC, (_NAMED, _ANYHOW)),
    "proc": (_BY_PROC,),
}


def excused(world: str, test: str, ended: str) -> bool:
    """May a test that passes in the plain world end like this in the world?"""
    if ended.startswith("skipped"):
        lacking = next((text for name, text in LACKING.items() if world.startswith(name)), None)
        return lacking is not None and re.search(lacking, ended) is not None
    subjects = next((ways for name, ways in SUBJECTS.items() if world.startswith(name)), ())
    function = test.rpartition("::")[2].partition("[")[0]
    return any(
        (not functions or function in functions) and re.search(how, ended) is not None
        for functions, how in subjects
    )
