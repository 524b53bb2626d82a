"""Decides who searches which study next: a run on its own, or any number of runs on one
database."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import sqlalchemy as sql

from generator.studies import leases
from generator.studies.leases import Lease
from generator.studies.outage import retry_in_outage
from generator.studies.postgres import connect, lock_schema
from generator.studies.storage import is_shared

LEASE_SECONDS = 30.0
"""Seconds without a heartbeat after which any run may claim a study."""
_BEATS = 3  # heartbeats in that time
_T = TypeVar("_T")


class Queue:
    """Hands out studies; nobody else has one that is handed out. This one is that of a run whose
    studies nobody else can have."""

    def claim(self, studies: Sequence[str]) -> Lease | None:
        """A lease of the first of `studies` that is free, None when others have them all."""
        return Lease(studies[0]) if studies else None

    def release(self, lease: Lease) -> None:
        """Give it back, searched to its end or not."""

    def holders(self, studies: Sequence[str]) -> dict[str, str]:
        """Return who has which of `studies`; those that nobody has are left out."""
        return {}

    def close(self) -> None:
        """Give everything back."""


class SharedQueue(Queue):
    """Leases in the database at `url`, kept alive by a thread until they are released.

    seconds: how long a lease lives without a heartbeat. Raises NormforgeError when the database
    cannot be reached.
    """

    def __init__(self, url: str, seconds: float = LEASE_SECONDS) -> None:
        self._engine = connect(url)
        self._seconds = seconds
        self._holder = f"{socket.gethostname()}:{os.getpid()}"
        self._held: set[Lease] = set()
        self._inserted: set[str] = set()
        self._closed = threading.Event()
        self._in_transaction(self._create)
        self._heart = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)
        self._heart.start()

    def claim(self, studies: Sequence[str]) -> Lease | None:
        new = set(studies) - self._inserted
        if new:
            self._in_transaction(lambda connection: leases.insert_missing(connection, new))
            self._inserted |= new
        lease = self._in_transaction(
            lambda connection: leases.claim(connection, studies, self._holder, self._seconds)
        )
        if lease is not None:
            self._held.add(lease)
        return lease

    def release(self, lease: Lease) -> None:
        self._held.discard(lease)
        self._in_transaction(lambda connection: leases.release(connection, lease))

    def holders(self, studies: Sequence[str]) -> dict[str, str]:
        return self._in_transaction(lambda connection: leases.holders(connection, studies))

    def close(self) -> None:
        self._closed.set()
        self._heart.join()
        try:
            with self._engine.begin() as connection:
                for lease in self._held:
                    leases.release(connection, lease)
        except sql.exc.SQLAlchemyError:
            pass  # leases end by themselves without the database
        self._engine.dispose()

    @staticmethod
    def _create(connection: sql.Connection) -> None:
        lock_schema(connection)
        leases.create_table(connection)

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(self._seconds / _BEATS):
            try:
                with self._engine.begin() as connection:
                    for lease in list(self._held):
                        if not leases.renew(connection, lease, self._seconds):
                            self._held.discard(lease)  # somebody else's; the next write tells
            except sql.exc.SQLAlchemyError:
                pass  # the next beat may be in time; if not, the first write will tell

    def _in_transaction(self, work: Callable[[sql.Connection], _T]) -> _T:
        def once() -> _T:
            with self._engine.begin() as connection:
                return work(connection)

        return retry_in_outage(once)


def open_queue(storage: str | None, seconds: float = LEASE_SECONDS) -> Queue:
    """The queue that goes with a storage: leases where it is shared. seconds: see SharedQueue."""
    return SharedQueue(storage, seconds) if storage and is_shared(storage) else Queue()
