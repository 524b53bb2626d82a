"""Leases: rows in the database that say who may search a study, and until when.

Claiming a study makes a new token. Every write of a result checks the token in its own transaction
(`postgres.py`), so whoever lost a lease without noticing it, suspended or cut off from the network,
can write nothing. All times are the database's: no machine's clock counts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sql
from sqlalchemy.dialects.postgresql import insert

_TABLE = sql.Table(
    "normforge_leases",
    sql.MetaData(),
    sql.Column("study", sql.String(512), primary_key=True),
    sql.Column("token", sql.BigInteger, nullable=False, server_default="0"),
    sql.Column("holder", sql.Text),
    sql.Column("expires", sql.DateTime(timezone=True)),
)


@dataclass(frozen=True)
class Lease:
    """The right to search a study. token: another one for every claim of that study."""

    study: str
    token: int = 0


class LeaseLostError(Exception):
    """Somebody else has claimed the study since."""


def create_table(connection: sql.Connection) -> None:
    """Create the table of leases where it is missing."""
    _TABLE.metadata.create_all(connection)


def insert_missing(connection: sql.Connection, studies: Collection[str]) -> None:
    """Make the rows of `studies`, at least one: in one order everywhere, so that no two tuners
    deadlock."""
    rows = [{"study": study} for study in sorted(studies)]
    connection.execute(insert(_TABLE).on_conflict_do_nothing(), rows)


def claim(
    connection: sql.Connection, studies: Sequence[str], holder: str, seconds: float
) -> Lease | None:
    """A lease of `seconds` on the first of `studies` that nobody has, None where there is none."""
    place = sql.case({study: n for n, study in enumerate(studies)}, value=_TABLE.c.study)
    free = sql.or_(_TABLE.c.expires.is_(None), _TABLE.c.expires < sql.func.now())
    row = connection.execute(
        sql.select(_TABLE.c.study, _TABLE.c.token)
        .where(_TABLE.c.study.in_(studies), free)
        .order_by(place)
        .limit(1)
        .with_for_update(skip_locked=True)
    ).first()
    if row is None:
        return None
    taken = {"token": row.token + 1, "holder": holder, "expires": _from_now(seconds)}
    connection.execute(sql.update(_TABLE).where(_TABLE.c.study == row.study).values(taken))
    return Lease(row.study, row.token + 1)


def renew(connection: sql.Connection, lease: Lease, seconds: float) -> bool:
    """Let a lease live for `seconds` from now; False when it is somebody else's by now."""
    longer = sql.update(_TABLE).where(*_row_of(lease)).values(expires=_from_now(seconds))
    return connection.execute(longer).rowcount == 1


def release(connection: sql.Connection, lease: Lease) -> None:
    """End a lease. The token changes at once, so that no late heartbeat brings it back."""
    free = {"token": lease.token + 1, "holder": None, "expires": None}
    connection.execute(sql.update(_TABLE).where(*_row_of(lease)).values(free))


def holds(lease: Lease) -> sql.Select[tuple[str]]:
    """A query with a row while the lease is valid. Nobody can claim the study before the
    transaction that asks it has ended."""
    found = sql.select(_TABLE.c.study).where(*_row_of(lease))
    return found.with_for_update(read=True, key_share=True)


def holders(connection: sql.Connection, studies: Sequence[str]) -> dict[str, str]:
    """Return who has which of `studies`; those that nobody has are left out."""
    held = sql.and_(_TABLE.c.study.in_(studies), _TABLE.c.expires >= sql.func.now())
    rows = connection.execute(sql.select(_TABLE.c.study, _TABLE.c.holder).where(held))
    return {row.study: row.holder for row in rows}


def _row_of(lease: Lease) -> tuple[sql.ColumnElement[bool], ...]:
    return _TABLE.c.study == lease.study, _TABLE.c.token == lease.token


def _from_now(seconds: float) -> sql.ColumnElement[datetime]:
    return sql.func.now() + sql.func.make_interval(0, 0, 0, 0, 0, 0, seconds)
