"""The committed predictions for a GPU that was not here come out of today's model again: whoever
changes a constant, a feature or the fitted trees has to predict them anew."""

from __future__ import annotations

import json
import lzma

import pytest

from generator.evaluate.predict.evaluator import Predictor
from generator.kernels.nvrtc import Compiled
from generator.kernels.ptxas import Resources
from generator.kernels.variant import make_variant
from generator.paths import GENERATED
from generator.problem import Problem
from generator.target import find_target
from normforge.spec import MAIN_KERNEL
from tests.support.committed import config_of

GPU = "gb200"


def test_committed_predictions_are_those_of_todays_model() -> None:
    """Every ninth trial is checked, of all strategies, pipelines, widths and dtypes."""
    predictor, kinds = Predictor(find_target(GPU)), set()
    with lzma.open(GENERATED / GPU / "studies.journal.xz", "rt", encoding="utf-8") as journal:
        studies_and_trials = ('{"op_code":0', '{"op_code":4')
        lines = [json.loads(line) for line in journal if line.startswith(studies_and_trials)]
    names = [line["study_name"] for line in lines if line["op_code"] == 0]
    trials = [line for line in lines if line["op_code"] == 4 and line["user_attrs"]["us"]]
    for trial in trials[::9]:
        known = trial["user_attrs"]
        config = config_of(trial)
        if "form" in config:  # of a forward, which has another model
            continue
        problem = Problem.parse(names[trial["study_id"]].partition("@")[0])
        resources = Resources(known["registers"], 0, 0, 0)
        compiled = Compiled("", "", b"", {MAIN_KERNEL: resources}, "", False, "")
        found = predictor.evaluate(problem, make_variant(config, problem), compiled, None)
        parts = known["result"]["extra"]["parts"]
        assert found.extra["parts"] == pytest.approx(parts, rel=1e-6), (str(problem), config)
        assert found.floor_us == pytest.approx(known["floor_us"], rel=1e-6)
        kinds.add((config["strategy"], config["pipeline"]))
    assert len(kinds) > 12
