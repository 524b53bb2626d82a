"""Warnings of a package: each once, at the line of the program that made the call."""

from __future__ import annotations

import sys
import warnings


class WarnOnce:
    """Warns once per sentence, at the first frame outside this package and PyTorch."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, sentence: str) -> None:
        if sentence not in self._said:
            warnings.warn(sentence, stacklevel=_first_frame_outside())
            self._said.add(sentence)  # now, as the program may make errors of warnings


def _first_frame_outside() -> int:
    """The stack level, for the caller of this function, of the first frame outside this library and
    PyTorch."""
    runtime = __name__.rpartition(".serve.")[0]
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None:
        package = f"{frame.f_globals.get('__package__')}."
        if not package.startswith((f"{runtime}.", "torch.")):
            break
        frame, level = frame.f_back, level + 1
    return level
