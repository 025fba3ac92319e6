"""A client as the daemon knows it: what it waits for, and the connection on which it is told."""

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

#: A client that leaves so many events unread is gone, as far as events are concerned.
MAX_EVENTS: Final = 200_000


class Session:
    """One client; its events go out on a thread of their own, so that no drain waits for it.

    Attributes:
        told: how many events there were, sent or about to be.
    """

    def __init__(self, sock: socket.socket, peer: Peer) -> None:
        self.id = os.urandom(SESSION_BYTES)
        self.peer = peer
        self.told = 0
        self._sock = sock
        self._events: deque[Message | None] = deque()
        self._more = threading.Condition()
        self._failed: dict[OpenReceipt, int] = {}  # and how often each had been driven again
        self._thread = threading.Thread(target=self._send_all, name="kvio-events", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def watch(self, receipt: OpenReceipt) -> None:
        """Tell the client how a write of its ends."""
        retried = receipt.retried  # the future may be of a later turn, then we look once more
        receipt.as_future().add_done_callback(partial(self._ended, receipt, retried))

    def watch_again(self) -> None:
        """Look at failed writes again: of those that are driven once more the client is told."""
        with self._more:
            again = [one for one, retried in self._failed.items() if one.retried != retried]
            for receipt in again:
                del self._failed[receipt]
                self._put_locked(Driven(receipt.sequence))
        for receipt in again:
            self.watch(receipt)

    def failed(self, numbers: Collection[int]) -> dict[OpenReceipt, int]:
        """Give those of some writes that failed, and how often each had been driven again."""
        wanted = set(numbers)
        with self._more:
            return {one: n for one, n in self._failed.items() if one.sequence in wanted}

    def forget(self, receipts: Collection[OpenReceipt]) -> None:
        """Note that failed writes are over: nothing more will be heard of them."""
        with self._more:
            for receipt in receipts:
                self._failed.pop(receipt, None)

    def end(self, timeout: float | None) -> None:
        """Send what is still to be sent, then nothing more."""
        with self._more:
            self._put_locked(None)
        self._thread.join(timeout)

    def cut(self) -> None:
        """Give up a client that does not listen."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it went first

    def _ended(self, receipt: OpenReceipt, retried: int, future: Future[Receipt]) -> None:
        """Tell how a write ended, but for a failure that is history: it is driven again."""
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
