"""A process that runs scenarios on a disk, cuts its power in many ways, and reports what it found.

    python -m tests.faults.blocks.cutting DIRECTORY SERVER KIND STATES SEED SCENARIO...

Writes one line of JSON for each scenario. Everything is mounted in a namespace of its own, on a
tmpfs of its own, and is gone with the process.
"""

from __future__ import annotations

import json
import sys

from tests.faults.blocks import disk, kernel, workload
from tests.faults.blocks.log import Image, read_log
from tests.faults.blocks.replay import Replay
from tests.posix import children


def record(kind: str, name: str, work: str, server: str, seed: int) -> Image:
    """Run a scenario on a fresh file system, and give the disk as it was before.

    Every other scenario has small blocks.
    """
    image = f"{work}/image"
    disk.make(kind, image, small=list(workload.SCENARIOS).index(name) % 2 == 1)
    before = Image.of_file(image)
    with disk.Disk(kind, image, work, server) as faulty:
        faulty.mark(b'{"start": 1}')
        children.in_child(lambda: workload.run(name, faulty.root, faulty.mark_path, seed))
        faulty.mark(b'{"end": 1}')
    return before


def main(arguments: list[str]) -> None:
    """Do what the command line says."""
    work, server, kind, states, seed, *names = arguments
    kernel.own_namespace()
    kernel.mount("none", work, "tmpfs", "size=2g,mode=700")
    for name in names:
        before = record(kind, name, work, server, int(seed))
        records = read_log(f"{work}/log")
        replay = Replay(kind, name, records, before=before, work=work, seed=int(seed))
        verdicts = replay.run(int(states))
        print(json.dumps({"scenario": name, **verdicts.as_json()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
