"""A client as the daemon knows it: what it waits for, and the connection on which it is told."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import Final

from kvio.errors import BlockExistsError, BlockNotFoundError
from kvio.types import Receipt
from kvio.wrappers.staging.daemon.faults import failure_of
from kvio.wrappers.staging.daemon.messages import SESSION_BYTES, Failed, Message, Stored
from kvio.wrappers.staging.daemon.sockets import Peer, send
from kvio.wrappers.staging.receipts import OpenReceipt

#: A client that leaves so many events unread is gone, as far as events are concerned.
MAX_EVENTS: Final = 200_000


class Session:
    """One client; its events go out on a thread of their own, so that no drain waits for it."""

    def __init__(self, sock: socket.socket, peer: Peer) -> None:
        self.id = os.urandom(SESSION_BYTES)
        self.peer = peer
        self._sock = sock
        self._events: deque[Message | None] = deque()
        self._more = threading.Condition()
        self._failed: dict[OpenReceipt, BaseException | None] = {}
        self._thread = threading.Thread(target=self._send_all, name="kvio-events", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def watch(self, receipt: OpenReceipt) -> None:
        """Tell the client how a write of its ends."""
        receipt.as_future().add_done_callback(partial(self._ended, receipt))

    def watch_again(self) -> None:
        """Look at failed writes again: some are driven once more, or were already."""
        with self._more:
            failed = self._failed.items()
            again = [one for one, error in failed if not one.done or one.error is not error]
            for receipt in again:
                del self._failed[receipt]
        for receipt in again:
            self.watch(receipt)

    def find_failed(self, sequence: int) -> OpenReceipt | None:
        """Give a failed write of this client."""
        with self._more:
            return next((one for one in self._failed if one.sequence == sequence), None)

    def failed(self) -> list[OpenReceipt]:
        """Give the failed writes of this client."""
        with self._more:
            return list(self._failed)

    def forget(self, receipt: OpenReceipt) -> None:
        """Note that a failed write was given up."""
        with self._more:
            self._failed.pop(receipt, None)

    def end(self, timeout: float | None) -> None:
        """Send what is still to be sent, then nothing more."""
        self._put(None)
        self._thread.join(timeout)

    def cut(self) -> None:
        """Give up a client that does not listen."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it went first

    def _ended(self, receipt: OpenReceipt, future: Future[Receipt]) -> None:
        error = future.exception()
        if error is None:
            self._put(_stored(receipt, future.result()))
            return
        if not isinstance(error, BlockExistsError | BlockNotFoundError):  # these are over
            with self._more:
                self._failed[receipt] = error
        self._put(Failed(receipt.sequence, receipt.absorbed, failure_of(error)))
        if not receipt.done or receipt.error is not error:  # it is driven again already
            self.watch_again()

    def _put(self, event: Message | None) -> None:
        with self._more:
            self._events.append(event)
            self._more.notify()
            if len(self._events) <= MAX_EVENTS:
                return
        self.cut()

    def _send_all(self) -> None:
        while True:
            with self._more:
                self._more.wait_for(lambda: self._events)
                event = self._events.popleft()
            if event is None:
                return
            try:
                send(self._sock, event)
            except OSError:
                return  # it is gone; its writes go on


def _stored(receipt: OpenReceipt, stored: Receipt) -> Stored:
    return Stored(
        receipt.sequence,
        receipt.absorbed,
        stored.nbytes,
        stored.checksum,
        stored.level,
        stored.mode,
        stored.existed,
        stored.reason,
    )
