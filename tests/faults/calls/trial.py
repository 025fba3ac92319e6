"""A process that tries faults on operations and says what was broken: run by ``python -m``.

A broken variant of kvio is tried in it; it ends with status 3 where promises were broken.
"""

from __future__ import annotations

import os
import random
import sys
import traceback
from pathlib import Path

import kvio
from tests.faults.calls.benches import BENCHES
from tests.faults.calls.fault_kinds import every_fault
from tests.faults.calls.test_sites import make_root
from tests.faults.sizes import seed
from tests.posix.test_syscall_faults import KINDS, BrokenPromiseError
from tests.sharedfile import test_faults as lives

FAULTS = 60
BROKEN = 3


def broken(name: str, root: Path) -> str:
    """Try faults until a promise is broken; what was, and where that was noticed."""
    bench = BENCHES[name](root)
    todo = list(every_fault(bench.calls(), 2))
    try:
        os.environ["KVIO_LIE"] = os.environ.get("KVIO_LIE_NOW", "none")
        for fault in random.Random(seed()).sample(todo, min(FAULTS, len(todo))):
            bench.trial(fault)
    except (AssertionError, BrokenPromiseError, kvio.KvioError) as exc:
        return f"{name}: {fault}\n" + "".join(traceback.format_exception(exc))
    finally:
        os.environ["KVIO_LIE"] = "none"
        bench.close()
    return ""


def main() -> int:
    """Try the operations named after a directory to work in."""
    parent = Path(sys.argv[1])
    lives.KINDS.update(KINDS)  # the errors that the shared files' own tests leave out
    said = ""
    for number, name in enumerate(sys.argv[2:]):
        said += broken(name, make_root(parent, f"r{number}"))
    print(said)
    return BROKEN if said else 0


if __name__ == "__main__":
    sys.exit(main())
