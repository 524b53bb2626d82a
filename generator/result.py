"""The result of one variant on one problem, in the words that every part of the tuner shares."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

OUTCOMES = {
    "ok": "accurate, the same bits in every run",
    "compile_error": "NVRTC refused the source",
    "resource": "spills, or does not fit the SM",  # or ptxas did not respect the register cap
    "launch_error": "the driver refused the launch",  # or memory ran out in a fresh process, too
    "timeout": "past its deadline",
    "crashed": "the GPU worker died",  # or its context was lost
    "wrong": "numbers outside the error bound, or damage outside the outputs",
    "nondeterministic": "bits changed between runs",
    "slow": "far behind the best, not checked further",
}
"""The outcomes of a trial, and their meanings where it is measured."""
PREDICTED_OUTCOMES = OUTCOMES | {
    "ok": "predicted; nothing ran on the GPU",
    "nondeterministic": "bits depend on the order of arrival, by construction",
}
"""The outcomes of a trial, and their meanings where it is predicted."""


_ERROR = "error_"
FLOOR_BYTES = "floor_bytes"
"""The name in a result's `extra` of the bytes that its floor moves."""


@dataclass(frozen=True)
class Result:
    """The outcome of one variant on one problem.

    us: time of the whole operation in microseconds (cold L2, CUDA graph; or predicted).
    floor_us: the operation's floor in the same block (or predicted), which moves
    extra[FLOOR_BYTES]; see `generator.studies.records.plain_floor` for results without.
    ratio: us / floor_us, the median of paired ratios when measured. determinism: `verified`,
    `refuted` or `unverified`.
    errors: ||out - ref|| / ||ref|| of every output, by name.
    checks: names of the checks passed. note: one sentence about what went wrong, else "".
    noisy: the times are from a GPU that was disturbed, and serve as a hint only.
    """

    outcome: str
    us: float | None = None
    floor_us: float | None = None
    ratio: float | None = None
    determinism: str = "unverified"
    errors: dict[str, float] = field(default_factory=dict)
    checks: tuple[str, ...] = ()
    note: str = ""
    noisy: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def timed(self) -> bool:
        """True when it was timed and found accurate, whether or not it may win."""
        return self.ratio is not None and self.outcome in ("ok", "nondeterministic")

    @property
    def may_win(self) -> bool:
        return self.outcome == "ok" and self.ratio is not None

    @property
    def gpu(self) -> str:
        """The uuid of the GPU that measured it, "" where none is known."""
        return str(self.extra.get("gpu", ""))

    def rounded(self) -> Result:
        """Return the result without digits that are noise, which would be most of a packed
        study."""
        ratio = None if self.ratio is None else round(self.ratio, 6)
        errors = {name: float(f"{error:.4g}") for name, error in self.errors.items()}
        return replace(self, ratio=ratio, errors=errors)

    @property
    def named_errors(self) -> dict[str, float]:
        """The errors as records have them: `error_<output>`."""
        return {f"{_ERROR}{name}": error for name, error in self.errors.items()}

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        del data["errors"]
        return data | self.named_errors

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        known = {name: value for name, value in data.items() if not name.startswith(_ERROR)}
        found = {name.removeprefix(_ERROR): data[name] for name in data.keys() - known.keys()}
        errors = {name: error for name, error in sorted(found.items()) if error is not None}
        return cls(**{**known, "checks": tuple(data.get("checks", ())), "errors": errors})
