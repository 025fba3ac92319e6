"""Copies of the working tree, in which mutants run: what is killed leaves the tree as it was."""

from __future__ import annotations

import ast
import hashlib
import os
import runpy
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Final

#: What is mutated: an area's name, and where its files are.
AREAS: Final = {
    "C core": ("src/kvio/_native", (".c", ".h")),
    "posix": ("src/kvio/backends/posix", (".py",)),
    "sharedfile": ("src/kvio/sharedfile", (".py",)),
    "staging": ("src/kvio/staging", (".py",)),
    "connectors": ("src/kvio/connectors", (".py",)),
}
#: Declarations without code (a changed one does not compile or changes nothing), a table of
#: numbers that a generator wrote, what cffi writes, and modules of others that are imitated.
SKIPPED: Final = ("kvio.cdef.h", "crc32c_tables.h", "_core.c", "stand_ins")
#: Imported only when it is used; tests of these skip without torch.
NEED_TORCH: Final = ("src/kvio/connectors/torch_dcp/", "src/kvio/staging/device.py")
NATIVE: Final = Path("src/kvio/_native")
EXTENSION: Final = NATIVE / "_core.abi3.so"
_COPIED: Final = (
    *("src", "tests", "tools", "docs", "examples", "benchmarks"),
    *("pyproject.toml", "setup.py", "setup.cfg", "noxfile.py", "README.md", "CHANGELOG.md"),
    *("CONTRIBUTING.md", "MANIFEST.in", "LICENSE"),
)
_IGNORED: Final = shutil.ignore_patterns(
    "*.so", "__pycache__", "_core.c", "*.egg-info", ".hypothesis"
)


def area_of(path: str) -> str:
    """Name the area that a file belongs to."""
    return next(area for area, (where, _) in AREAS.items() if path.startswith(where))


def sources(root: Path) -> list[str]:
    """List the files that are mutated, relative to *root*."""
    found: list[str] = []
    for where, suffixes in AREAS.values():
        found += [
            str(path.relative_to(root))
            for path in sorted((root / where).rglob("*"))
            if path.suffix in suffixes and not any(part in SKIPPED for part in path.parts)
        ]
    return [path for path in found if not _lacking(root, path)]


@cache
def _lacking(root: Path, path: str) -> bool:
    """Return whether a file needs a module that is not installed: its tests skip."""
    if path.startswith(NEED_TORCH):
        return find_spec("torch") is None
    if not path.endswith(".py") or not (root / path).exists():
        return False
    modules: list[str] = []
    for node in ast.parse((root / path).read_text()).body:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.append(node.module)
    ours = [f"src/{name.replace('.', '/')}.py" for name in modules if name.startswith("kvio.")]
    others = {name.partition(".")[0] for name in modules} - {"kvio"}
    return any(find_spec(name) is None for name in others) or any(
        _lacking(root, each) for each in ours
    )


def lacking_lines(text: str) -> set[int]:
    """Return the lines of Python functions that need torch, if it is not installed.

    They take it from `sys.modules`, where their caller has seen it.
    """
    if find_spec("torch") is not None:
        return set()
    return {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(part) == "sys.modules['torch']" for part in ast.walk(node))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def digest(root: Path, paths: Iterable[str]) -> str:
    """Hash the names and contents of files."""
    state = hashlib.sha256()
    for path in paths:
        state.update(path.encode() + b"\0" + (root / path).read_bytes() + b"\0")
    return state.hexdigest()[:16]


def copy_tree(root: Path, target: Path) -> None:
    """Copy what the tests need of the working tree."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in _COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, target / name, ignore=_IGNORED, symlinks=True)
        else:
            shutil.copy2(root / name, target / name)


class Core:
    """The C core of one copy of the tree, built object by object.

    Args:
        tree: the copy.
        flags: options of the compiler beside the flags of ``build.py``.
        extra: C files that are linked into it, compiled without *flags*.
    """

    def __init__(
        self, tree: Path, *, flags: Sequence[str] = (), extra: Sequence[Path] = ()
    ) -> None:
        self.tree = tree
        self.flags = flags
        self.extra = extra
        self.compiler = shlex.split(os.environ.get("CC", "cc"))
        self.objects: dict[str, Path] = {}

    @cached_property
    def names(self) -> list[str]:
        """The C files of the extension; makes cffi write its own."""
        before = Path.cwd()
        os.chdir(self.tree)
        try:
            module = runpy.run_path(str(NATIVE / "build.py"))
            module["ffibuilder"].emit_c_code(str(NATIVE / "_core.c"))
        finally:
            os.chdir(before)
        return ["_core.c", *module["SOURCES"]]

    def build(self) -> None:
        """Compile everything and link it."""
        for name in self.names:
            self.objects[name] = self.tree / f"{name}.o"
            error = self.compile(name, self.objects[name])
            assert not error, error
        self.link(self.objects)

    def compile(self, name: str, target: Path) -> str:
        """Compile one file; the compiler's message if it does not compile."""
        return self._compile(NATIVE / name, target, self.flags)

    def _compile(self, source: Path, target: Path, flags: Sequence[str]) -> str:
        include = f"-I{sysconfig.get_paths()['include']}"
        standard = ("-std=gnu11", "-O2", "-w", "-fvisibility=hidden", "-fPIC")
        command = [*self.compiler, *standard, include, f"-I{NATIVE}", *flags]
        command += ["-c", str(source), "-o", str(target)]
        done = subprocess.run(command, cwd=self.tree, capture_output=True, text=True, check=False)
        return done.stderr or "failed" if done.returncode else ""

    def link(self, objects: dict[str, Path]) -> str:
        """Link the extension into its place at once; the linker's message if it cannot."""
        more = []
        for source in self.extra:
            more.append(self.tree / f"{source.name}.o")
            error = self._compile(source, more[-1], ())
            assert not error, error
        new = self.tree / "new.so"
        command = [*self.compiler, "-shared", "-o", str(new), *map(str, [*objects.values(), *more])]
        # A symbol that nobody defines would be found missing by the first test only.
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not done.returncode:
            new.replace(self.tree / EXTENSION)
        return done.stderr if done.returncode else ""

    def changed(self, path: str) -> dict[str, Path] | str:
        """Compile what depends on a changed file: the objects that differ, or the error."""
        name = Path(path).name
        todo = [name] if name.endswith(".c") else self.names
        differ = {}
        for each in todo:
            target = self.tree / f"{each}.changed.o"
            if error := self.compile(each, target):
                return error
            if target.read_bytes() != self.objects[each].read_bytes():
                differ[each] = target
        return differ
