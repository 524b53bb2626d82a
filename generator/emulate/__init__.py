"""Runs rendered kernels on the CPU, unmodified, under schedules that a seed controls."""

from generator.emulate.build import find_compiler
from generator.emulate.check import Check, check_variant
from generator.emulate.run import Layout, Runs, Schedule, run_schedules

__all__ = [
    "Check",
    "Layout",
    "Runs",
    "Schedule",
    "check_variant",
    "find_compiler",
    "run_schedules",
]
