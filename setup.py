"""What pyproject.toml cannot say: cffi builds the C core, with a compiler and Python's headers."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig


def missing() -> str | None:
    """Return one line that says what to install before the C core can be built, or None."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    include = sysconfig.get_path("include")
    headers = (os.path.join(include, "Python.h"), sysconfig.get_config_h_filename())
    lacks = [] if shutil.which(compiler) else [f"a C compiler ({compiler!r})"]
    lacks += [header for header in headers if not os.path.exists(header)][:1]
    if not lacks:
        return None
    return (
        f"kvio has a C core, and to build it this machine lacks {' and '.join(lacks)}: "
        "install a compiler and Python's headers first (Debian, Ubuntu: apt install gcc "
        "python3-dev; Fedora: dnf install gcc python3-devel)"
    )


if __name__ == "__main__":
    from setuptools import setup

    error = None if "sdist" in sys.argv else missing()
    if error:
        sys.exit(f"error: {error}")
    setup(cffi_modules=["src/kvio/_native/build.py:ffibuilder"])
