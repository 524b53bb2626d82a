"""Studies in a PostgreSQL database that many tuners share.

Optuna's own storage with three things added: a trial is written in a dozen statements and not in a
hundred; every transaction of a tuner that holds a lease checks the lease; a connection that is lost
shows within half a minute.
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sql
from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import orm

from generator.studies.leases import Lease, LeaseLostError, holds
from generator.studies.outage import open_error

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


class GrowingStorage(RDBStorage):
    """Optuna's storage in a database, in which a knob may get more values between the trials of a
    study. Optuna's journals allow that, too; an Optuna that calls the step otherwise refuses it."""

    def _set_trial_param_without_commit(
        self,
        session: orm.Session,
        trial_id: int,
        param_name: str,
        param_value_internal: float,
        distribution: BaseDistribution,
        previous_distribution: BaseDistribution | None = None,
    ) -> None:
        own = previous_distribution or distribution
        super()._set_trial_param_without_commit(
            session, trial_id, param_name, param_value_internal, distribution, own
        )


class SharedStorage(GrowingStorage):
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
