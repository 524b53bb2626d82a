"""Completes the recorded reason why a winner won with who was faster in its finals."""

from __future__ import annotations

from generator.errors import NormforgeError
from generator.kernels.variant import kernel_of
from generator.search.choose_winner import choose
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space_once, space_file
from generator.studies.reader import Study
from generator.target import find_target


def reason(study: Study) -> str:
    """The recorded reason of a study's winner. Where today's rule would choose a faster one among
    the same times, that one as well: the winner stays as an incumbent, so that bits stay."""
    winner = study.winner
    assert winner is not None
    name, gap = passed_over(study) or ("", 0.0)
    return winner.reason + (f"; kept, though finalist {name} was {gap:.2%} faster" if name else "")


def passed_over(study: Study) -> tuple[str, float] | None:
    """The finalist that would win without an incumbent, and by how much it was faster; None where
    the winner would, or was as fast, and where times were predicted."""
    if study.winner is None or study.evidence != "measured":
        return None
    try:
        space = load_space_once(space_file(study.problem.operation))
        legal = LegalConfigs(space, study.problem, find_target(study.gpu))
        choice = choose(study.finals, legal.rank, None)
    except (NormforgeError, KeyError, ValueError):
        return None  # its space or GPU is not known here
    own = next((result for config, result in study.finals if config == study.winner.config), None)
    if choice is None or own is None:
        return None
    config, result = study.finals[choice.winner]
    if not own.ratio or not result.ratio or own.ratio <= result.ratio:
        return None
    return kernel_of(config, study.problem).id, own.ratio / result.ratio - 1
