"""What strace sees of an unmodified process: no call beside the table, and the kernel's own errors.

The table of the C core is what most of the campaign goes by; here the kernel is asked.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

import kvio
from tests.faults.calls.benches import STORES
from tests.faults.calls.subject import SUBJECTS
from tests.faults.calls.tracing import Traced
from tests.faults.sizes import seed, size
from tests.faults.totals import Tally
from tests.posix.scenarios import Scenario
from tests.posix.test_syscall_faults import ERRORS, KINDS, SYNCS, syncs_owed

#: Everything that names a file or a descriptor, and where random bytes come from.
WATCHED: Final = "trace=%file,%desc,getrandom,io_uring_setup"
#: Which system calls the sites of the table are.
SITES: Final = {
    "open_temp": "openat",
    "open_read": "openat",
    "open_dir": "openat",
    "mkdir": "mkdirat",
    "fstat": "newfstatat",
    "fchmod": "fchmod",
    "fallocate": "fallocate",
    "write": "pwritev2",
    "read": "preadv2",
    "fdatasync": "fdatasync",
    "sync_range": "sync_file_range",
    "link": "linkat",
    "rename": "renameat2",
    "unlink": "unlinkat",
    "fsync_dir": "fsync",
    "close": "close",
    "cachestat": "cachestat",
    "fcntl": "fcntl",
    "truncate": "ftruncate",
    "random": "getrandom",
    "alive": "newfstatat",
    "fchown": "fchown",
    "clone": "ioctl",
}
#: What other kernels, libraries and versions of strace call the same.
ALIASES: Final = {
    "renameat": "renameat2",
    "syscall_0x1c3": "cachestat",
    "fstat": "newfstatat",
    "pwritev": "pwritev2",
    "preadv": "preadv2",
    "statx": "newfstatat",
}
#: Calls of Python's own that are not in the table, by the operation's first word, and how many.
#: A directory that was removed is replaced under its number, and the new number is closed.
BESIDE: Final[dict[str, dict[str, int]]] = {"vanished": {"dup3": 1, "close": 1}}
ANY: Final = 1 << 30
#: os.scandir of directories that the C core opened.
_LISTING: Final = {"fcntl": ANY, "newfstatat": ANY, "getdents64": ANY, "lseek": ANY, "close": ANY}
#: The map beside a shared file: made, mapped and read by Python, as are the boot id, the mounts
#: and, where a mount was added or removed, what lies below the file system.
_MAP: Final = {
    "openat": ANY,
    "newfstatat": ANY,
    "close": ANY,
    "fcntl": ANY,
    "getrandom": ANY,
    "ioctl": ANY,
    "lseek": ANY,
    "read": ANY,
    "fstatfs": ANY,
    "getdents64": ANY,
    "mmap": ANY,
    "fallocate": 1,
    "pwrite64": 2,
    "pread64": ANY,
    "preadv2": ANY,
    "readlink": ANY,
    "fsetxattr": 1,  # the id of a file with a sidecar
    "fgetxattr": 1,
}
#: The file that becomes a block is opened and looked at by Python, which copies a short one.
_FILE: Final = {"newfstatat": ANY, "openat": 2, "close": 3, "dup3": 1, "lseek": 1, "read": 1}

_TRIES: Final = 8
#: What asking a file system what it can do takes; not an operation's calls, and never part of one.
PROBE: Final = Counter(
    {"cachestat": 1, "fsync": 1, "linkat": 2, "pwrite64": 2, "pwritev2": 1}
    | {"renameat2": 3, "unlinkat": 4}
)


def beside(name: str) -> dict[str, int]:
    """Return which calls an operation makes beside those of the table."""
    if name.startswith("shared file"):
        return _MAP
    if name in ("list", "sweep"):
        return _LISTING
    if name.startswith(("move", "clone or copy")):
        return _FILE
    return BESIDE["vanished"] if "vanished" in name else {}


def strangers(name: str, listed: Counter[str], sites: dict[str, int]) -> list[str]:
    """Compare what the kernel was asked with what the table counted."""
    kernel: Counter[str] = Counter()
    for call, number in listed.items():
        kernel[ALIASES.get(call, call)] += number
    counted: Counter[str] = Counter()
    for site, number in sites.items():
        counted[SITES[site]] += number
    more = beside(name)
    if kernel["cachestat"] and not counted["cachestat"] and name.startswith("shared file"):
        kernel.subtract(PROBE)  # the mount table changed, so the file system was asked again
    return [
        f"{call}: the kernel saw {kernel[call]}, the table {counted[call]}"
        for call in sorted({*kernel, *counted})
        if not counted[call] <= kernel[call] <= counted[call] + more.get(call, 0)
    ]


@pytest.fixture
def traced(disk_path: Path) -> Iterator[Traced]:
    """Yield a process to examine."""
    traced = Traced(disk_path)
    yield traced
    traced.close()


@pytest.mark.slow
def test_no_call_is_made_beside_the_table(traced: Traced) -> None:
    """Of every operation strace lists as many calls as the table counts, and no others."""
    names = list(SUBJECTS)
    chosen = random.Random(seed()).sample(names, size(16, len(names)))
    problems, lacking, seen = [], [], 0
    for name in chosen:
        if reason := traced.prepare(name):
            lacking.append(f"{name}: {reason}")
            continue
        answer, listed = observe(traced, name)
        seen += listed.total()
        problems += [f"{name}: {line}" for line in strangers(name, listed, answer["calls"])]
    print(f"{seen} calls of {len(chosen)} operations; not here: {lacking}")

    assert not problems, "\n".join(problems)
    assert seen > 5 * len(chosen) or len(lacking) == len(chosen)


class Injection(NamedTuple):
    """How strace lets the n-th call of a kind fail."""

    call: str
    nth: int
    error: int
    for_ever: bool = False

    @property
    def option(self) -> str:
        """Return it in strace's notation."""
        when = f"{self.nth}+" if self.for_ever else f"{self.nth}"
        return f"inject={self.call}:error={self.error}:when={when}"


def injections(listed: Counter[str], most: int = 3) -> Iterator[Injection]:
    """Yield every way in which the calls of an operation fail, the first *most* of each kind."""
    for call, number in sorted(listed.items()):
        for nth in range(1, min(number, most) + 1):
            for error in ERRORS:
                yield Injection(call, nth, error)
                if error != errno.EINTR and nth == 1:
                    yield Injection(call, nth, error, for_ever=True)


def observe(traced: Traced, name: str, *options: str) -> tuple[dict[str, Any], Counter[str]]:
    """Do what is prepared under strace; what it says, and its calls.

    A thread can have its tracer and not have been stopped by it yet: then its first calls are not
    listed, and it is done again.
    """
    for _ in range(_TRIES):
        answer = traced.go("-e", WATCHED, *options)
        if name in (listed := traced.listed()):
            return answer, listed[name]
        assert traced.prepare(name) is None
    raise AssertionError(f"strace was {_TRIES} times too late for {name}")


def inject(traced: Traced, name: str, how: Injection) -> tuple[dict[str, Any], Counter[str], int]:
    """Do an operation while strace lets a call fail; how often that was comes last."""
    assert traced.prepare(name) is None
    answer, listed = observe(traced, name, "-e", how.option)
    return answer, listed, traced.log.read_text().count("(INJECTED)")


def lost_syncs(
    scenario: Scenario, needed: Mapping[str, int], answer: dict[str, Any], good: Mapping[str, int]
) -> list[str]:
    """Return the calls whose success rests on fewer successful syncs than without a fault."""
    calls = {site: needed[SITES[site]] for site in SYNCS}
    reported = {key: error and kvio.KvioError(error[0]) for key, error in answer["errors"].items()}
    return [
        f"success is reported, but of {owed} calls of {SITES[site]} {good[SITES[site]]} succeeded"
        for site, owed in syncs_owed(scenario, calls, reported).items()
        if good[SITES[site]] < owed
    ]


def check_injected(
    scenario: Scenario, how: Injection, traced: Traced, needed: Mapping[str, int]
) -> tuple[list[str], int]:
    """Do an operation with a fault; the promises that were broken, and how often it failed."""
    answer, good, injected = inject(traced, scenario.name, how)
    good[how.call] -= injected
    lost = [f"{how.option}: {line}" for line in lost_syncs(scenario, needed, answer, good)]
    return check(scenario, how, answer, injected) + lost, injected


def check(scenario: Scenario, how: Injection, answer: dict[str, Any], injected: int) -> list[str]:
    """List the promises that were broken."""
    assert scenario.new is not None
    broken = []
    for key, error in answer["errors"].items():
        held = answer["stored"][key]
        if error is None:
            if held != scenario.new.hex():
                broken.append(f"success is reported, but {key} is not what was written")
            continue
        if held not in {None if c is None else c.hex() for c in scenario.allowed_after_failure()}:
            broken.append(f"after {error} {key} is torn")
        if how.error == errno.EINTR or error != [KINDS[how.error].__name__, how.error, key]:
            broken.append(f"not the right error: {error}")
    # A close that strace fails is never made: the descriptor stays open by its doing.
    if answer["leaked"] != (injected if how.call == "close" else 0):
        broken.append(f"{answer['leaked']} descriptors leaked")
    if answer["left"] and how.call != "unlinkat":
        broken.append(f"left behind: {answer['left']}")
    return [f"{scenario.name}, {how.option}: {line}" for line in broken]


PATHS: Final = tuple(
    scenario
    for scenario in STORES
    if scenario.name in ("write durable", "replace durable", "write by rename", "batch durable")
)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", PATHS, ids=lambda s: s.name)
def test_errors_of_the_kernel_are_reported_as_errors_of_the_table(
    scenario: Scenario, traced: Traced, tally: Tally
) -> None:
    """Failed by strace, a publish gives no receipt and no torn name, leaks nothing, and works."""
    if reason := traced.prepare(scenario.name):
        pytest.skip(f"the temporary directory's file system lacks it: {reason}")
    _, needed = observe(traced, scenario.name)
    ways = list(injections(needed))
    few = random.Random(seed()).sample(ways, min(len(ways), size(10, 1 << 20)))
    problems, missed = [], []
    for how in few:
        broken, injected = check_injected(scenario, how, traced, needed)
        problems += broken
        missed += [] if injected else [how.option]
        assert traced.prepare(scenario.name) is None
        after = traced.go()
        if any(after["errors"].values()):
            problems.append(f"{scenario.name}, {how.option}: the next fails: {after['errors']}")
    tally.add(faults=len(few) - len(missed), torn=0, lost=0)
    print(f"{scenario.name}: {len(few)} injections of {len(ways)}")

    assert not problems, "\n".join(problems)
    assert not missed, f"did not come to pass: {missed}"


#: Memory of Python's own looks like the map's; a close that strace fails is never made, so
#: that the writer's lock stands.
_NOT_OURS: Final = ("mmap", "getrandom", "close")


@pytest.mark.slow
def test_calls_beside_the_table_fail_as_typed_errors(traced: Traced, tally: Tally) -> None:
    """What Python itself asks for a shared file may fail as well: typed, whole or no name."""
    name = next(name for name in SUBJECTS if name.startswith("shared file"))
    if reason := traced.prepare(name):
        pytest.skip(f"the temporary directory's file system lacks it: {reason}")
    observe(traced, name)
    listed = traced.listed_of_one_thread(name)
    ways = [
        how
        for how in injections(listed, 24)
        if how.call in _MAP and how.call not in _NOT_OURS and not how.for_ever
        # A file of /proc is always ready; Python's text files do not know that answer.
        if (how.call, how.error) != ("read", errno.EAGAIN)
    ]
    random.Random(seed()).shuffle(ways)
    problems, missed, met = [], [], 0
    for how in ways:
        if met == size(16, len(ways)):
            break
        answer, _, injected = inject(traced, name, how)
        if not injected:
            # What was counted first looked at the mounts once more: others come and go meanwhile.
            made = traced.listed_of_one_thread(name)[how.call]
            missed += [f"{how.option} of {made}"] if made >= how.nth else []
            continue
        met += 1
        (error,), (held,) = answer["errors"].values(), answer["stored"].values()
        said = f"{how.option}: {error}, {held}"
        if error is None and held != "whole":
            problems.append(f"{said}: success is reported, but there is no file")
        if error is not None and not hasattr(kvio, error[0]):
            problems.append(f"{said}: not of the tree of errors")
        if answer["left"]:
            problems.append(f"{said}: left {answer['left']}")
        leaked = answer["leaked"] - (injected if how.call == "close" else 0)
        if leaked > 0:
            problems.append(f"{said}: {leaked} descriptors leaked")
    tally.add(faults=met, torn=0)
    print(f"{met} injections of {len(ways)}")

    assert not problems, "\n".join(problems)
    assert not missed, f"did not come to pass: {missed}"
    assert met >= size(16, len(ways) // 2)
