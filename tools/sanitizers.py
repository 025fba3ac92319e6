"""Compilers that look closely: the sanitizers and gcc's analyzer."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import nox


def analyse(
    session: nox.Session, compiler: str, sources: list[str], *, include: str, scratch: Path
) -> None:
    """Report what gcc -fanalyzer thinks; its opinions fail nothing."""
    flags = ("-fanalyzer", "-std=gnu11", "-O1", include, "-c", "-o", os.devnull)
    reports = []
    for source in sources:
        command = [*shlex.split(compiler), *flags, source]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            session.warn(f"SKIPPED: no report of -fanalyzer; {compiler} cannot do it")
            return
        reports.append(run.stderr)
    found = "".join(reports)
    (scratch / "analyzer.txt").write_text(found)
    remarks = found.count("[-Wanalyzer")
    session.log(f"-fanalyzer: {remarks} remarks, to read in {scratch}/analyzer.txt")


def sanitizer_libraries(compiler: str) -> dict[str, str]:
    """Return the environment in which an ordinary Python loads a sanitized extension."""
    libraries = []
    for name in ("libasan.so", "libubsan.so"):
        command = [*shlex.split(compiler), f"-print-file-name={name}"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if os.path.isabs(found):
            libraries.append(os.path.realpath(found))
    return {"LD_PRELOAD": " ".join(libraries)} if len(libraries) == 2 else {}
