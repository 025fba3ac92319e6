"""A small campaign on one reader, reported as JSON: ``python -m tests.faults.rot.one_block ROOT``.

It is the campaign of `test_blocks`, run on a C core that is broken on purpose.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import kvio
from kvio import _native
from tests.faults.rot.campaign import Campaign
from tests.faults.rot.damage import Patient
from tests.faults.sizes import seed
from tests.posix import faultlab

KEY = "models/a"


def main(root: Path) -> None:
    """Damage a block in all ways, and put another's in its place; print what went unnoticed."""
    payload = faultlab.pattern(1, 9001)
    with kvio.open_store("posix-tmpfile", root=root) as store:
        store.write_block(KEY, payload)
        with Patient(faultlab.file_of(root, KEY)) as patient:
            done = Campaign(store, KEY, payload, patient, random.Random(seed()))
            done.trailer()
            done.checksummed(30)
            done.shapes(3)
            done.contents(iter([("another key's block", faultlab.seal(payload, "models/b"))]))
            done.healed()
    reported = {"flips": done.flips, "missed": done.missed, "core": str(_native.__file__)}
    print(json.dumps(reported))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
