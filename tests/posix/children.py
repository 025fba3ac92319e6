"""Forked children that do one thing in a world of their own and report what went wrong."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import platform
import resource
import signal
import struct
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

_NEW_NAMESPACE = 0x00020000  # CLONE_NEWNS
_BIND = 0x1000  # MS_BIND
_PRIVATE_TREE = 0x00044000  # MS_REC | MS_PRIVATE
_DETACH = 2  # MNT_DETACH
_NO_NEW_PRIVS = 38
_SET_SECCOMP = 22
_libc = ctypes.CDLL(None, use_errno=True)


def in_child(work: Callable[[], str | None] | Callable[[], None], *, inherits: bool = True) -> str:
    """Run *work* in a forked child and return what it returned; fail with its traceback.

    *inherits*: with the descriptors of this process, which earlier tests may have left open.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read_end)
            if not inherits:
                _close_all_but(write_end)
            report = _report_of(work)
            code = report[0]
            with os.fdopen(write_end, "wb") as pipe:
                pipe.write(report[1].encode())
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        said = pipe.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, f"the child ended with {code}:\n{said}"
    return said


def _close_all_but(kept: int) -> None:
    """Close all descriptors from 3 on but one; their objects are never collected."""
    gc.collect()
    gc.freeze()
    os.closerange(3, kept)
    os.closerange(kept + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _report_of(work: Callable[[], str | None]) -> tuple[int, str]:
    try:
        return 0, work() or ""
    except BaseException:  # noqa: BLE001  # whatever it is, the parent shows it
        return 1, traceback.format_exc()


def become(uid: int, *groups: int) -> None:
    """Become a user for good, a member of these groups and of the one with its number."""
    os.setgroups(groups)
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def hide_proc() -> None:
    """Take /proc away from this process alone."""
    _check(_libc.unshare(_NEW_NAMESPACE))
    _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE_TREE), None))
    _check(_libc.umount2(b"/proc", _DETACH))


def hide(path: str | os.PathLike[str]) -> None:
    """Put an empty directory over a path, for this process alone."""
    _check(_libc.unshare(_NEW_NAMESPACE))
    _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE_TREE), None))
    target = ctypes.c_char_p(os.fsencode(path))
    _check(_libc.mount(b"none", target, ctypes.c_char_p(b"tmpfs"), ctypes.c_ulong(0), None))


def bind(path: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Mount a directory a second time, for this process alone."""
    _check(_libc.unshare(_NEW_NAMESPACE))
    _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE_TREE), None))
    _check(_libc.mount(os.fsencode(path), os.fsencode(target), None, ctypes.c_ulong(_BIND), None))


def killed(work: Callable[[], object]) -> None:
    """Run *work* in a forked child, which it must kill."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == -signal.SIGKILL, f"the child ended with {status}"


def _check(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Refusal(NamedTuple):
    """A system call that fails with *error* if *argument*, masked, has (not) a value."""

    call: str
    argument: int
    mask: int
    value: int
    equal: bool
    error: int


_TMPFILE_BIT = os.O_TMPFILE & ~os.O_DIRECTORY
NO_TMPFILE = Refusal("openat", 2, _TMPFILE_BIT, _TMPFILE_BIT, True, errno.EOPNOTSUPP)
NO_EMPTY_PATH = Refusal("linkat", 4, 0x1000, 0x1000, True, errno.ENOENT)
NO_PROC_LINK = Refusal("linkat", 4, 0x400, 0x400, True, errno.ENOENT)
NO_RENAME_FLAGS = Refusal("renameat2", 4, 0xFFFFFFFF, 0, False, errno.EINVAL)
NO_DIRECT = Refusal("openat", 2, os.O_DIRECT, os.O_DIRECT, True, errno.EINVAL)

_MACHINES = {
    "x86_64": (
        0xC000003E,
        {
            "close": 3,
            "openat": 257,
            "linkat": 265,
            "renameat2": 316,
            "sched_setaffinity": 203,
            "sched_getaffinity": 204,
            "mbind": 237,
            "set_mempolicy": 238,
            "get_mempolicy": 239,
            "move_pages": 279,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "close": 57,
            "openat": 56,
            "linkat": 37,
            "renameat2": 276,
            "sched_setaffinity": 122,
            "sched_getaffinity": 123,
            "mbind": 235,
            "get_mempolicy": 236,
            "set_mempolicy": 237,
            "move_pages": 239,
        },
    ),
}
_LOAD, _AND, _JUMP_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse(refusals: Sequence[Refusal]) -> None:
    """Let system calls of this process fail for good, as if kernel or file system lacked them."""
    program = b"".join(_compile(*_MACHINES[platform.machine()], refusals))
    text = ctypes.create_string_buffer(program, len(program))
    argument = _Program(len(program) // 8, ctypes.addressof(text))
    _check(_libc.prctl(_NO_NEW_PRIVS, ctypes.c_ulong(1), *[ctypes.c_ulong(0)] * 3))
    _check(_libc.prctl(_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(argument), 0, 0))


def _compile(arch: int, numbers: dict[str, int], refusals: Sequence[Refusal]) -> list[bytes]:
    def instruction(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("<HBBI", code, if_true, if_false, k)

    program = [
        instruction(_LOAD, 4),
        instruction(_JUMP_EQUAL, arch, 1),
        instruction(_RETURN, _ALLOW),
    ]
    for refusal in refusals:
        skip = (0, 1) if refusal.equal else (1, 0)
        program += [
            instruction(_LOAD, 0),
            instruction(_JUMP_EQUAL, numbers[refusal.call], 0, 4),
            instruction(_LOAD, 16 + 8 * refusal.argument),
            instruction(_AND, refusal.mask),
            instruction(_JUMP_EQUAL, refusal.value, *skip),
            instruction(_RETURN, _ERRNO | refusal.error),
        ]
    return [*program, instruction(_RETURN, _ALLOW)]


def need_root() -> None:
    """Skip unless the test runs as root."""
    if os.geteuid() != 0:
        pytest.skip("needs root")


def need_seccomp() -> None:
    """Skip where filters cannot be written for this processor."""
    if platform.machine() not in _MACHINES:
        pytest.skip(f"no seccomp filter is known for {platform.machine()}")
