"""Studies in a PostgreSQL database that many tuners share.

Optuna's own storage with three things added: a trial is written in a dozen statements and not in a
hundred; every transaction of a tuner that holds a lease checks the lease; a connection that is lost
shows within half a minute.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import sqlalchemy as sql
from optuna.distributions import distribution_to_json
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import orm

from generator.errors import NormforgeError, one_line
from generator.studies.leases import Lease, LeaseLostError, holds

MAX_OUTAGE_SECONDS = 90.0
"""How long a database that went away in the middle of a run is waited for."""
_RETRY_SECONDS = 1.0
_SCHEMA_LOCK = 0x6E6F726D666F7267  # "normforg": the advisory lock under which tables are created
# Parameters of libpq, seconds (milliseconds for the last): a peer that is gone without a word is
# noticed within half a minute instead of two hours.
_LIBPQ = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30000,
}
_T = TypeVar("_T")


def without_credentials(url: str) -> str:
    """The URL without user, password and options, whatever else is wrong with it."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"


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


def connect(url: str) -> sql.Engine:
    """An engine for `url`; nothing is opened yet. Raises NormforgeError for a URL that is none."""
    try:
        return sql.create_engine(url, **_options(url))
    except Exception as error:  # a driver that is missing or broken raises what it likes
        raise open_error(url, error) from error


def _options(url: str) -> dict[str, Any]:
    driver = sql.make_url(url).get_driver_name()
    libpq = _LIBPQ if driver in ("psycopg", "psycopg2") else {}
    # A server has about a hundred connections for a whole cluster: one is kept, not five.
    return {"pool_pre_ping": True, "pool_size": 1, "connect_args": libpq}


def lock_schema(connection: sql.Connection) -> None:
    """Hold other tuners back until the transaction ends: PostgreSQL's CREATE TABLE IF NOT EXISTS
    fails when two do it at once."""
    connection.execute(sql.select(sql.func.pg_advisory_xact_lock(_SCHEMA_LOCK)))


def is_outage(error: BaseException) -> bool:
    """Whether a database error may pass when the server or the network is back, or when another
    program is done with an SQLite file."""
    if isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
    if not isinstance(error, (sql.exc.OperationalError, sql.exc.InterfaceError)):
        return False
    return not isinstance(error.orig, sqlite3.Error) or "is locked" in str(error.orig)


def reason_of(error: BaseException) -> str:
    """What the driver says, without what SQLAlchemy and Optuna say around it."""
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
        except (sql.exc.SQLAlchemyError, StorageInternalError) as error:
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


class SharedStorage(RDBStorage):
    """Optuna's storage in PostgreSQL. While `lease` is set, whatever is written is written under
    it: LeaseLostError rolls a transaction back when the lease is somebody else's by now."""

    def __init__(self, url: str) -> None:
        self.lease: Lease | None = None
        engine = connect(url)
        try:
            with engine.begin() as connection:
                lock_schema(connection)
                super().__init__(url, engine_kwargs=_options(url))
        finally:
            engine.dispose()
        sql.event.listen(self.scoped_session, "before_commit", self._check)

    def _check(self, session: orm.Session) -> None:
        if self.lease is not None and session.execute(holds(self.lease)).first() is None:
            raise LeaseLostError(self.lease.study)

    def _get_prepared_new_trial(
        self, study_id: int, template_trial: FrozenTrial | None, session: orm.Session
    ) -> models.TrialModel:
        """Optuna's step of the same name, without a query per parameter and attribute. An Optuna
        that calls the step otherwise is slow again, and right."""
        if template_trial is None or template_trial.intermediate_values:
            return super()._get_prepared_new_trial(study_id, template_trial, session)
        known = self._written(study_id, template_trial, session)
        if known is not None:
            return known
        trial = models.TrialModel(
            study_id=study_id,
            state=TrialState.RUNNING,
            number=models.TrialModel.count(session, models.StudyModel(study_id=study_id)),
            datetime_start=template_trial.datetime_start,
            datetime_complete=template_trial.datetime_complete,
        )
        session.add(trial)
        session.flush()
        own = {"trial_id": trial.trial_id}
        for name, distribution in template_trial.distributions.items():
            value = distribution.to_internal_repr(template_trial.params[name])
            text = distribution_to_json(distribution)
            param = {"param_name": name, "param_value": value, "distribution_json": text}
            session.add(models.TrialParamModel(**own, **param))
        for model, attributes in (
            (models.TrialUserAttributeModel, template_trial.user_attrs),
            (models.TrialSystemAttributeModel, template_trial.system_attrs),
        ):
            for key, value in attributes.items():
                session.add(model(**own, key=key, value_json=json.dumps(value)))
        for objective, value in enumerate(template_trial.values or ()):
            self._set_trial_value_without_commit(session, trial, objective, value)
        trial.state = template_trial.state
        return trial

    @staticmethod
    def _written(
        study_id: int, template: FrozenTrial, session: orm.Session
    ) -> models.TrialModel | None:
        """The trial as it was written by a commit whose answer was lost with the connection: the
        last of its study. The template's number is that in the memory of a search, which leaves
        out trials of old code."""
        found = (
            session.query(models.TrialModel)
            .filter(models.TrialModel.study_id == study_id)
            .order_by(models.TrialModel.number.desc())
            .first()
        )
        same = found is not None and found.datetime_start == template.datetime_start
        return found if same else None
