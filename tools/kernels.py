"""A kernel for guests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import nox


def debian_kernel(session: nox.Session) -> str | None:
    """Download Debian's newest kernel for clouds and unpack it; None, with a warning, elsewhere."""
    scratch = Path(session.create_tmp()).resolve() / "kernel"
    scratch.mkdir(exist_ok=True)
    try:
        if not any(scratch.glob("boot/vmlinuz-*")):
            depends = ("apt-cache", "depends", "--important", "linux-image-cloud-amd64")
            said = subprocess.run(depends, capture_output=True, text=True, check=True).stdout
            package = said.split()[-1]
            subprocess.run(["apt-get", "download", "-qq", package], cwd=scratch, check=True)
            [archive] = scratch.glob(f"{package}_*.deb")
            subprocess.run(["dpkg-deb", "-x", archive, scratch], check=True)
            archive.unlink()
        return str(max(scratch.glob("boot/vmlinuz-*")))
    except (OSError, ValueError, subprocess.CalledProcessError) as exc:
        session.warn(f"SKIPPED: no kernel for the guest (linux-image-cloud-amd64): {exc}")
        return None
