"""Names that were made to lead elsewhere, and trees that tell whether one did."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_SEEDS: Final = (
    *("..", "../x", "../outside/secret", "../../etc/passwd", "/etc/passwd", "//etc/passwd"),
    *("a/../../outside/secret", "a/..", "a/../b", "./x", "a/./b", ".", "", "a//b", "a/", "/a"),
    *("....//x", "..;/x", "..\\x", "..%2fx", "%2e%2e/x", "%2e%2e%2fx", "%252e%252e%252fx"),
    *("..%c0%afx", "..%00/x", "%00", "a%0ab", "~", "~root", "~/x", "$HOME/x", "${PATH}", "`id`"),
    *("C:\\x", "C:/x", "\\\\host\\share", "CON", "NUL", "a:b", "file:///etc/passwd", "a?b", "a*b"),
    *(".kvio-tmp-0-1-0", ".kvio-calibration.json", ".x.kvio-map", ".hidden", "a/.hidden", "-rf"),
    *("a\0b", "\0", "a\nb", "a\rb", "a\tb", "\x1b[2J", "a b", " a", "a ", "a\x7f", "lost+found"),
    *("é", "e\u0301", "\uff0e\uff0e\uff0fx", "\u2025/x", "\u2024\u2024/x", "\u202egnp", "\ufeffx"),
    *(
        "a\u200bb",
        "\ud800",
        "\udcff",
        "\U0001f600",
        "ǅ",
        "ﬁ",
        "K",
        "\u0131",
        "a\u2215b",
        "a\u2044b",
    ),
    *("/proc/self/fd/0", "/dev/null", "proc/self/root", "outside", "outside/secret", "root/../x"),
    *("--help", "-", "@x", "+", "=", "a@{b}", "{}", "[]", "a;b", "a|b", "a&b", "a'b", 'a"b', "a,b"),
)


def words() -> Iterator[str]:
    """Yield every name once: seeds, their depths and lengths around limits."""
    made = list(_SEEDS)
    made += ["../" * depth + "etc/passwd" for depth in (2, 5, 20)]
    made += ["x/" * depth + ".." for depth in (1, 50)]
    for nbytes in (199, 200, 201, 254, 255, 256, 4095, 4096, 5000):
        made += ["a" * nbytes, "é" * (nbytes // 2), "a/" * (nbytes // 2) + "a"]
    yield from dict.fromkeys(made)


def make_outside(folder: Path) -> Path:
    """Make a tree that nobody may touch, beside where a root will be."""
    outside = folder / "outside"
    (outside / "deep/er").mkdir(parents=True)
    (outside / "secret").write_bytes(b"outside the root\n" * 9)
    (outside / "deep/er/secret").write_bytes(b"deep outside the root\n")
    (folder / "x").write_bytes(b"x outside the root\n")
    return outside


def look_at(*paths: Path) -> dict[str, tuple[int, int, bytes | str]]:
    """Describe all that lies at and below paths: kind and mode, links, content."""
    found: dict[str, tuple[int, int, bytes | str]] = {}
    for top in paths:
        for path in (top, *sorted(top.rglob("*"))):
            info = path.lstat()
            content: bytes | str = ""
            if stat.S_ISREG(info.st_mode):
                content = path.read_bytes()
            elif stat.S_ISLNK(info.st_mode):
                content = os.readlink(path)
            found[str(path)] = (info.st_mode, info.st_uid, content)
    return found


def entries(folder: Path, *, without: str) -> set[str]:
    """Name what lies in a folder but for one entry."""
    return {name for name in os.listdir(folder) if name != without}
