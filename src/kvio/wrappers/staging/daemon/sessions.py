"""The daemon's state of one client: its writes, and the connection for events."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from functools import partial
from typing import Final

from kvio.errors import BlockExistsError, BlockNotFoundError
from kvio.types import Receipt
from kvio.wrappers.staging.daemon.faults import failure_of
from kvio.wrappers.staging.daemon.messages import SESSION_BYTES, Driven, Failed, Message, Stored
from kvio.wrappers.staging.daemon.sockets import Peer, send
from kvio.wrappers.staging.receipts import OpenReceipt

#: A client with so many unread events gets no more.
MAX_EVENTS: Final = 200_000


class Session:
    """One client; its events are sent by a separate thread, so that no drain waits for it.

    Attributes:
        told: number of events, sent or queued.
    """

    def __init__(self, sock: socket.socket, peer: Peer) -> None:
        self.id = os.urandom(SESSION_BYTES)
        self.peer = peer
        self.told = 0
        self._sock = sock
        self._events: deque[Message | None] = deque()
        self._more = threading.Condition()
        self._failed: dict[OpenReceipt, int] = {}  # with the number of retries of each
        self._thread = threading.Thread(target=self._send_all, name="kvio-events", daemon=True)

    def start(self) -> None:
        """Start sending."""
        self._thread.start()

    def watch(self, receipt: OpenReceipt) -> None:
        """Send the outcome of a write to the client when it is known."""
        retried = receipt.retried  # the future may be of a later retry, then it is checked again
        receipt.as_future().add_done_callback(partial(self._ended, receipt, retried))

    def watch_again(self) -> None:
        """Check failed writes again, and send an event for each that is being retried."""
        with self._more:
            again = [one for one, retried in self._failed.items() if one.retried != retried]
            for receipt in again:
                del self._failed[receipt]
                self._put_locked(Driven(receipt.sequence))
        for receipt in again:
            self.watch(receipt)

    def failed(self, numbers: Collection[int]) -> dict[OpenReceipt, int]:
        """Return which of some writes failed, and how often each was retried."""
        wanted = set(numbers)
        with self._more:
            return {one: n for one, n in self._failed.items() if one.sequence in wanted}

    def forget(self, receipts: Collection[OpenReceipt]) -> None:
        """Record that there will be no more events for failed writes."""
        with self._more:
            for receipt in receipts:
                self._failed.pop(receipt, None)

    def end(self, timeout: float | None) -> None:
        """Send the queued events, then stop."""
        with self._more:
            self._put_locked(None)
        self._thread.join(timeout)

    def cut(self) -> None:
        """Disconnect a client that does not read its events."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it went first

    def _ended(self, receipt: OpenReceipt, retried: int, future: Future[Receipt]) -> None:
        """Send the outcome of a write, except a failure that is being retried."""
        error = future.exception()
        with self._more:
            if error is None:
                self._put_locked(_stored(receipt, future.result()))
                return
            if receipt.retried == retried:
                self._put_locked(Failed(receipt.sequence, receipt.absorbed, failure_of(error)))
                if not isinstance(error, BlockExistsError | BlockNotFoundError):  # these are over
                    self._failed[receipt] = retried
                return
        self.watch(receipt)

    def _put_locked(self, event: Message | None) -> None:
        self._events.append(event)
        self.told += event is not None
        self._more.notify()
        if len(self._events) > MAX_EVENTS:
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
