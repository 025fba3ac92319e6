"""Every parser takes what it reads or refuses it by its one error, and takes no time or memory."""

from __future__ import annotations

import io
import ipaddress
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
import typer

from kvio import format as blocks
from kvio._native import crc32c
from kvio.cli.output import parse_duration
from kvio.connectors.dlio import decoding, tfrecord
from kvio.connectors.dlio.names import key_of
from kvio.errors import ConfigError, InvalidKeyError, KvioError
from kvio.placement.cpulist import parse_cpulist, parse_number
from kvio.placement.mounts import mount_of, parse_mounts
from kvio.placement.network import _route
from kvio.s3.options import options_from_url
from kvio.sharedfile import index, plan
from kvio.sharedfile.layout import Layout
from kvio.types import check_key
from kvio.url import parse_size, parse_url
from kvio.wrappers.staging.daemon import messages
from kvio.wrappers.staging.daemon.fields import ProtocolError
from tests.faults.security.fuzz.mutation import fuzz, mutate_text
from tests.faults.sizes import seed, size
from tests.faults.totals import Tally
from tests.staging.daemon.test_fuzz import _SAMPLES as MESSAGES

#: No parser needs more memory than this for any of what is parsed here.
MOST_BYTES: Final = 64 << 20
HASH: Final = blocks.key_hash("", "key")
LAYOUTS: Final = (
    Layout(50_000, 1, 4096, 8192, 0, (50_000,)),
    Layout(10_000, 3, 4096, 8192, 0, (5000, 0, 5000)),
    Layout(100_000, 4, 512, 4096, 8192, ()),
)


def sums_anew(data: bytes, at: int) -> bytes:
    """Give data with a right checksum of its first bytes: what one who means harm would do."""
    return data[:at] + struct.pack("<I", crc32c(data[:at])) + data[at + 4 :]


def block_trailer(data: bytes) -> object:
    """Take what ends a block, half of it sealed again."""
    if data[:1] > b"K" or len(data) % 2:
        data = sums_anew(data, 60)
    found = blocks.unpack_trailer(
        data[-64:], stored_nbytes=len(data) + 100, expected_key_hash=HASH, crc32c=crc32c
    )
    assert found.nbytes <= len(data) + 36
    return found


def shared_index(data: bytes) -> object:
    """Take the end of a sealed file as a reader does."""
    if len(data) % 2 and len(data) > 96:
        trailer = data[-96:]
        trailer = trailer[:68] + struct.pack("<I", crc32c(data[:-96])) + trailer[72:]
        data = data[:-96] + sums_anew(trailer, 92)
    trailer = data[-96:]
    nbytes = index.table_nbytes(trailer)
    table = data[:-96][-nbytes:] if nbytes else b""
    found = index.unpack(table, trailer, int.from_bytes(trailer[32:34], "little") + len(data))
    return index.whole_checksum(found) if found.layout.cells < 10_000 else found


def shared_map(data: bytes) -> object:
    """Take the head of a map as a writer does."""
    if len(data) % 2 and len(data) > 128:
        head = data[:124]
        writers, sizes = (
            struct.unpack_from("<I", head, 12)[0],
            struct.unpack_from("<Q", head, 72)[0],
        )
        if writers < 70_000 and sizes < 70_000:
            at = 192 + 16 * writers
            crc = crc32c(data[at : at + 8 * sizes], crc32c(head))
            data = head + struct.pack("<I", crc) + data[128:]
    plan.room_of(data[:192].ljust(192, b"\0"))
    return plan.unpack(data, 4096 + 4096 * (len(data) % 3))


def of_text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    """Parse text; what is no UTF-8 comes as a file system's names would."""
    return lambda data: parse(data.decode("utf-8", "surrogateescape"))


def url(text: str) -> object:
    """Take a URL to the end: of S3 its options too."""
    found = parse_url(text)
    return options_from_url(found) if found.scheme.startswith("s3") else found


def mounts(text: str) -> object:
    """Take a table of mounts and look for a path in it."""
    return mount_of(tuple(parse_mounts(text)), "/mnt/kv/store", (259, 1))


def route(text: str) -> object:
    """Take a table of routes."""
    return _route(text, ipaddress.IPv4Address("10.1.2.3"))


def messages_of_the_daemon() -> list[bytes]:
    """Give a message of each kind a client may send."""
    choose = random.Random(1)
    return [messages.encode(make(choose)) for make in MESSAGES for _ in range(3)]


def plans() -> Iterator[bytes]:
    """Give heads of maps."""
    for layout in LAYOUTS:
        made = plan.Plan(bytes(16), bytes(16), layout, 512, True, True, False, True, False)
        head, sizes = plan.pack(made)
        body = bytearray(made.sizes_at - len(head))
        yield head + bytes(body) + sizes + bytes(8)


def indices() -> Iterator[bytes]:
    """Give ends of sealed files."""
    for layout in LAYOUTS:
        for sums in (None, range(layout.cells)):
            yield index.pack(index.Index(bytes(16), layout, sums))


def arrays(kind: str) -> list[bytes]:
    """Give files of numpy."""
    found = []
    for array in (np.arange(20, dtype="u1"), np.ones((3, 4)), np.zeros((0,), "<U3")):
        file = io.BytesIO()
        np.save(file, array) if kind == "npy" else np.savez(file, x=array)
        found.append(file.getvalue())
    return found


def records() -> list[bytes]:
    """Give files of TFRecord."""
    one = tfrecord.example({"image": b"\1\2\3" * 30, "size": 90})
    return [tfrecord.framed(one), tfrecord.framed(one) * 3, tfrecord.framed(b"")]


def read_records(data: bytes) -> object:
    """Take every record, and look for its image."""
    return [bytes(tfrecord.image_of(each)) for each in tfrecord.records(memoryview(data))]


MOUNTS: Final = (
    b"36 35 98:0 /mnt1 /mnt/kv rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"
    b"37 36 259:1 / /mnt\\040x rw - nfs4 server:/x rw,vers=4.2,addr=10.0.0.1\n36 35 0:5 / /\n"
)
ROUTES: Final = (
    b"Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
    b"eth0\t00000000\t0102000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
    b"eth1\t0000010A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
)
URLS: Final = (
    b"hybrid:///mnt/kv?durability=durable&chunk_bytes=4MiB",
    b"s3+boto3://bucket/prefix/x?region=eu-central-1&part_bytes=8MiB&retries=3",
    b"posix-tmpfile:///a/%20b?create=true&layout=plain",
    b"memory",
)
#: Parsers: what they are given at first, what reads it, and its errors.
PARSERS: Final[dict[str, tuple[list[bytes], Callable[[bytes], object], Any]]] = {
    "block trailer": (
        [blocks.pack_trailer(blocks.Trailer(n, n, HASH), crc32c) for n in (0, 64, 100)],
        block_trailer,
        blocks.TrailerError,
    ),
    "index of a shared file": (list(indices()), shared_index, index.SealError),
    "map of a shared file": (list(plans()), shared_map, plan.PlanError),
    "message of the daemon": (messages_of_the_daemon(), messages.decode, ProtocolError),
    "URL": (list(URLS), of_text(url), ConfigError),
    "size": ([b"4MiB", b"512", b"1.5 GiB", b"7k"], of_text(parse_size), ConfigError),
    "duration": (
        [b"30s", b"15m", b"24h", b"7d", b"90"],
        of_text(parse_duration),
        typer.BadParameter,
    ),
    "key": ([b"a/b", b"models/llama=3@x+y-z", b"k" * 200], of_text(check_key), InvalidKeyError),
    "name of DLIO": ([b"/data/train/img_1.npz", b"./a"], of_text(key_of), InvalidKeyError),
    "list of CPUs": ([b"0-3,8", b"0", b"", b"0-255"], of_text(parse_cpulist), ConfigError),
    "number of sysfs": ([b"1\n", b"-1", b"65535"], of_text(parse_number), ()),
    "mounts": ([MOUNTS], of_text(mounts), ()),
    "routes": ([ROUTES], of_text(route), ()),
    "TFRecord": (records(), read_records, ValueError),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_takes_or_refuses(name: str, tally: Tally) -> None:
    """Mutants of valid input: each is taken, or is the parser's own error and no other."""
    samples, parse, error = PARSERS[name]
    for sample in samples:
        if name not in ("block trailer", "index of a shared file", "map of a shared file"):
            parse(sample)
    rounds = size(400, 30_000)
    dice = random.Random(f"{seed()} {name}")
    allowed = error if isinstance(error, tuple) else (error,)
    watched = min(rounds, 300)  # to watch memory is slow
    tracemalloc.start()
    try:
        fuzz(samples, parse, allowed, dice=dice, rounds=watched)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    fuzz(samples, parse, allowed, dice=dice, rounds=rounds - watched)

    tally.add(fuzzed=rounds)
    assert most < MOST_BYTES, f"{most} bytes at once"


@pytest.mark.parametrize("name", ["URL", "size", "duration", "key", "list of CPUs"])
def test_a_parser_of_text_takes_or_refuses(name: str, tally: Tally) -> None:
    """The same with what stumbles over text: signs, digits of other scripts, surrogates."""
    samples, _, error = PARSERS[name]
    parse: Any = {
        "URL": url,
        "size": parse_size,
        "duration": parse_duration,
        "key": check_key,
        "list of CPUs": parse_cpulist,
    }[name]
    dice = random.Random(f"{seed()} text {name}")
    rounds = size(400, 30_000)
    for _ in range(rounds):
        text = mutate_text(dice.choice(samples).decode(), dice)
        try:
            parse(text)
        except error:
            continue
        except BaseException as exc:
            exc.add_note(repr(text))
            raise
    tally.add(fuzzed=rounds)


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_a_decoder_of_samples_takes_or_refuses(kind: str, tally: Tally) -> None:
    """Damaged files of numpy are arrays or one error of kvio's, and no object of them runs."""
    dice = random.Random(f"{seed()} {kind}")
    rounds = size(300, 20_000)

    def parse(data: bytes) -> object:
        return decoding.decode(kind, memoryview(data), key="k")

    fuzz(arrays(kind), parse, (KvioError,), dice=dice, rounds=rounds)
    tally.add(fuzzed=rounds)
