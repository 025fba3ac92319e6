"""Run the server: ``python benchmarks/s3mem/server.py --access KEY --secret SECRET``.

It prints one line, its URL, once it listens, and leaves on SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import ssl
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # run as a file: the package is found from the root, not from in here
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.s3mem.operations import answer
from benchmarks.s3mem.service import Behaviour, Service
from benchmarks.s3mem.sigv4 import Verifier
from benchmarks.s3mem.wire import Connection, Reply, Request, WireError

_BACKLOG = 1024
_ENDING = (signal.SIGTERM, signal.SIGINT)


class Network(NamedTuple):
    """A simulated network: what each round trip takes, and the bytes a second of a connection.

    A connection takes a round trip before its first request. A request and its answer take one
    more, and the time of their bodies; 0: no limit.
    """

    round_trip_s: float = 0.0
    bytes_per_s: float = 0.0

    def carry(self, nbytes: int) -> None:
        """Wait as long as a round trip with so many bytes takes."""
        wait_s = self.round_trip_s + (nbytes / self.bytes_per_s if self.bytes_per_s else 0.0)
        if wait_s:
            time.sleep(wait_s)


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal ends it."""
    options = _parser().parse_args(arguments)
    if options.drop_bodies and options.etag == "md5":
        _parser().error("--drop-bodies leaves nothing to make an MD5 of")
    behaviour = Behaviour(
        etag=options.etag, domain=options.domain,
        drop_bodies=options.drop_bodies, trust_bodies=options.trust_bodies,
        reserve_bytes=options.reserve_mib << 20,
    )  # fmt: skip
    service = Service(Verifier(options.access, options.secret), behaviour)
    tls = _tls(options.tls_cert, options.tls_key) if options.tls_cert else None
    # Blocked in all threads and taken by sigwait: a handler in Python would wait for accept to
    # return, where the signal comes just before it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    if options.until_stdin_closes:
        threading.Thread(target=_stop_at_end_of_stdin, daemon=True).start()
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    network = Network(options.round_trip_ms / 1000, options.connection_mib_s * 2**20)
    listener = socket.create_server((options.host, options.port), family=family, backlog=_BACKLOG)
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"{'https' if tls else 'http'}://{host}:{listener.getsockname()[1]}", flush=True)
    threading.Thread(target=serve, args=(listener, service, tls, network), daemon=True).start()
    signal.sigwait(_ENDING)
    return 0  # the listener stays open until the process ends: its thread is in accept


def serve(
    listener: socket.socket,
    service: Service,
    tls: ssl.SSLContext | None,
    network: Network = Network(),  # noqa: B008  # immutable
) -> None:
    """Serve every connection on a thread of its own, until the listener fails."""
    try:
        while True:
            sock, _ = listener.accept()
            threading.Thread(
                target=_attend, args=(sock, service, tls, network), daemon=True
            ).start()
    except OSError:
        traceback.print_exc()
        os._exit(1)


def _attend(
    sock: socket.socket, service: Service, tls: ssl.SSLContext | None, network: Network
) -> None:
    """Answer the requests of one connection until one side is done."""
    try:
        network.carry(0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with tls.wrap_socket(sock, server_side=True) if tls else sock as wrapped:
            connection = Connection(wrapped)
            while _exchange(connection, service, network):
                pass
    except WireError as error:
        print(f"s3mem: {error}", file=sys.stderr)
    except OSError:
        pass  # the client left: nothing is owed to it


def _exchange(connection: Connection, service: Service, network: Network) -> bool:
    """Answer one request; False when the connection is of no more use."""
    try:
        request = connection.next_request()
    except UnicodeDecodeError:
        connection.send(Reply(400), only_head=False, close=True)
        return False
    if request is None:
        return False
    sent = max(0, connection.pending)
    reply = answer(service, connection, request)
    close = not connection.discard() or _wants_to_close(request)
    only_head = request.method == "HEAD"
    network.carry(sent + (0 if only_head else reply.nbytes))
    connection.send(reply, only_head=only_head, close=close)
    return not close


def _wants_to_close(request: Request) -> bool:
    return request.headers.get("connection", "").lower() == "close"


def _tls(certificate: str, key: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def _stop_at_end_of_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="An S3 server that keeps objects in memory.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--access", required=True, help="the one access key")
    parser.add_argument("--secret", required=True, help="its secret key")
    parser.add_argument("--domain", default="", help="serve BUCKET.DOMAIN too, not only paths")
    parser.add_argument("--tls-cert", help="serve https with this chain (PEM)")
    parser.add_argument("--tls-key", help="its key, where the chain's file does not hold it")
    parser.add_argument("--etag", choices=("cheap", "md5"), default="cheap")
    parser.add_argument(
        "--drop-bodies", action="store_true", help="keep sizes only; reads return zeros"
    )
    parser.add_argument(
        "--trust-bodies", action="store_true", help="make no digest of objects' bodies"
    )
    parser.add_argument(
        "--reserve-mib", type=int, default=0, help="memory for bodies to have before it listens"
    )
    parser.add_argument(
        "--round-trip-ms", type=float, default=0.0, help="simulate a network of such round trips"
    )
    parser.add_argument(
        "--connection-mib-s", type=float, default=0.0, help="and of this rate a connection"
    )
    parser.add_argument("--until-stdin-closes", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
