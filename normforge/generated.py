"""The packages of a checkout, by the names that they have in a wheel, where a folder takes the
place of this module. They are found where they lie: another package called `generated` hides none.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parent.parent / "generated")]
