"""Databases that cannot be opened or go away, without SQLAlchemy: files of studies need none."""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from optuna.exceptions import StorageInternalError

from generator.errors import NormforgeError, one_line

MAX_OUTAGE_SECONDS = 90.0
"""Seconds that a run waits for a database that went away in the middle of it."""
_RETRY_SECONDS = 1.0
_T = TypeVar("_T")


def without_credentials(url: str) -> str:
    """The URL without user, password and options, whatever else is wrong with it. Of one whose
    password may have a question mark only the scheme is shown."""
    scheme, _, rest = url.partition("://")
    place, _, options = rest.partition("?")
    if "@" in options and "@" not in place:
        return f"{scheme}://..."
    return f"{scheme}://{place.rpartition('@')[2]}"


def open_error(url: str, error: BaseException) -> NormforgeError:
    """The error for a database that cannot be opened."""
    reason = reason_of(error)
    if isinstance(error, ImportError):
        remedy = "install the driver, for PostgreSQL `pip install 'psycopg[binary]'`"
    else:
        remedy = "check the URL, the driver and the server"
    place = without_credentials(url)
    return NormforgeError(
        f"cannot open the storage {place} ({type(error).__name__}: {reason}): {remedy}"
    )


def is_outage(error: BaseException) -> bool:
    """Return True if a database error may pass when the server or the network is back, or when
    another program is done with an SQLite file."""
    from sqlalchemy.exc import InterfaceError, OperationalError

    if isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
    if not isinstance(error, (OperationalError, InterfaceError)):
        return False
    return not isinstance(error.orig, sqlite3.Error) or "is locked" in str(error.orig)


def reason_of(error: BaseException) -> str:
    """Return what the driver says, without what SQLAlchemy and Optuna say around it."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
    driver = getattr(cause, "orig", None) or cause or error
    return one_line(driver, 200)


def retry_in_outage(work: Callable[[], _T]) -> _T:
    """The answer of `work`, which is repeated while the database is away.

    Raises what `work` raises when that is no outage, and NormforgeError when the outage is longer
    than MAX_OUTAGE_SECONDS."""
    until = time.monotonic() + MAX_OUTAGE_SECONDS
    told = False
    while True:
        try:
            return work()
        except Exception as error:
            if not is_outage(error):
                raise
            reason = reason_of(error)
            if time.monotonic() > until:
                raise NormforgeError(
                    f"the database did not answer for {MAX_OUTAGE_SECONDS:.0f} s ({reason}): "
                    "finished trials are kept; run the same command to continue"
                ) from error
            if not told:
                print(f"Waiting for the database ({reason}).", file=sys.stderr, flush=True)
                told = True
            time.sleep(_RETRY_SECONDS)
