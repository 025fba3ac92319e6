"""What a client process is told, and what it tells: one line of JSON each."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Final, Self

from kvio import MiB

PUT: Final = "PUT"
GET: Final = "GET"
RANGE: Final = "range GET"
HEAD: Final = "HEAD"
LIST: Final = "LIST"
#: In this order: the later ones need what the first has stored.
OPERATIONS: Final = (PUT, GET, RANGE, HEAD, LIST)

LIBRARIES: Final = {
    "boto3": "boto3",
    "minio": "minio",
    "obstore": "obstore",
    "s3dlio": "s3dlio",
    "torch": "s3torchconnectorclient",
}
KINDS: Final = ("kvio", "kvio block", "direct", "defaults")
#: The raw client, signed in advance: what the server and the machine can do at most.
FLOOR: Final = "floor"
#: Every contender's name, in the order of tables.
CONTENDERS: Final = (FLOOR, *(f"{library} {kind}" for library in LIBRARIES for kind in KINDS))

#: Objects of one folder; LIST asks for the first one.
FOLDER_OBJECTS: Final = 100
#: What kvio and a library called by hand send in one request, at least.
_PART_BYTES: Final = 8 * MiB
_CONNECTIONS: Final = 64


def library_of(contender: str) -> str:
    """Give ``boto3`` of ``boto3 kvio block``; the floor is a library of its own."""
    return contender.partition(" ")[0]


def kind_of(contender: str) -> str:
    """Give ``kvio block`` of ``boto3 kvio block``."""
    return contender.partition(" ")[2] or FLOOR


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One load of one process; credentials come in the environment alone.

    Attributes:
        prefix: what the names of its objects begin with; nobody else has it.
        payload: a file of *distinct* payloads of *nbytes* each, one after the other.
        count: objects, at most.
        threads: calls at the same time.
        unsigned: bodies are not hashed, where that can be chosen.
        limit_s: no call of an operation begins later than this.
    """

    contender: str
    endpoint: str
    bucket: str
    region: str
    prefix: str
    payload: str
    distinct: int
    nbytes: int
    count: int
    threads: int
    operations: tuple[str, ...]
    unsigned: bool
    limit_s: float

    @property
    def part_bytes(self) -> int:
        """Give the part size under which each object here is one request."""
        return max(_PART_BYTES, self.nbytes)

    @property
    def connections(self) -> int:
        """Give the size of a pool: kvio's default, but no fewer than the threads."""
        return max(_CONNECTIONS, self.threads)

    @property
    def extent(self) -> tuple[int, int]:
        """Give start and length of a range GET: the second quarter."""
        return self.nbytes // 4, max(1, self.nbytes // 4)

    def key(self, index: int) -> str:
        """Name an object."""
        folder, name = divmod(index, FOLDER_OBJECTS)
        return f"{self.prefix}/o{folder:05d}/{name:02d}"

    @property
    def folder(self) -> str:
        """Give the prefix that LIST asks for."""
        return f"{self.prefix}/o00000/"

    def line(self) -> str:
        """Give it as it goes to the process."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of(cls, line: str) -> Self:
        """Read a line."""
        fields = json.loads(line)
        return cls(**{**fields, "operations": tuple(fields["operations"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What one operation took in one process, from the start signal to the last call's end.

    Attributes:
        start_s, end_s: by the machine's monotonic clock.
        intact: every byte, length or number of names was right; None for PUT.
        wrong: what was not, in a few words.
    """

    operation: str
    start_s: float
    end_s: float
    latencies_s: list[float] = field(default_factory=list)
    user_s: float
    system_s: float
    intact: bool | None = None
    wrong: str = ""

    def line(self) -> str:
        """Give it as it comes from the process."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of(cls, line: str) -> Self:
        """Read a line."""
        return cls(**json.loads(line))
