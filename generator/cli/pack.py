"""Studies packed for a repository: a quarter smaller than `xz` alone makes them.

    python -m generator.cli.pack generated/h200

Writes studies.journal.xz of a folder and removes its studies.journal; the next run unpacks it. Only
the last record has a seal, a new one over all before it (see generator/studies/journal.py), and the
times at which trials began and ended have whole seconds.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from generator.disk import replacing, sync
from generator.errors import NormforgeError
from generator.studies.journal import SealedJournal
from generator.studies.storage import JOURNAL_NAME
from generator.tuner.lifecycle import exclusive_run

_DATES = ("datetime_start", "datetime_complete")
_FILTERS = [
    {
        "id": lzma.FILTER_LZMA2,
        "preset": 9 | lzma.PRESET_EXTREME,
        "dict_size": 128 << 20,
        "lc": 4,
        "pb": 0,
    }
]
"""LZMA filters for text, whose units are bytes, and for the largest journal, of 300 MB."""


def pack(folder: Path) -> Path:
    """Pack the studies of a folder, and return the file. Raises NormforgeError when there are none,
    when they are corrupt or older than what is packed already, and when a run writes them; OSError.
    Then the packed file is as it was, and no whole record is lost."""
    journal, packed = folder / JOURNAL_NAME, folder / f"{JOURNAL_NAME}.xz"
    if not journal.exists():
        raise NormforgeError(f"no {JOURNAL_NAME} in {folder}: nothing to pack")
    if packed.exists() and packed.stat().st_mtime > journal.stat().st_mtime:
        raise NormforgeError(f"{packed} is newer than {journal}: remove the one that is not wanted")
    with exclusive_run(folder):
        SealedJournal(journal)  # checks all seals, and cuts off a torn last record
        if not journal.stat().st_size:
            raise NormforgeError(f"{journal} is empty: nothing to pack")
        with replacing(packed) as part:
            last: dict[str, Any] = {}
            with journal.open(encoding="utf-8") as records, part.open("w", encoding="utf-8") as to:
                for record in records:
                    if last:
                        to.write(json.dumps(last, separators=(",", ":")) + "\n")
                    last = _short(record)
            SealedJournal(part).append_logs([last])
            part.write_bytes(lzma.compress(part.read_bytes(), filters=_FILTERS))
            sync(part)
        sync(folder)
        journal.unlink()
    return packed


def _short(line: str) -> dict[str, Any]:
    """A record without its seal, and with dates of whole seconds."""
    record: dict[str, Any] = json.loads(line)
    record.pop("seal", None)
    for name in _DATES:
        if record.get(name):
            record[name] = datetime.fromisoformat(record[name]).isoformat(timespec="seconds")
    return record


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="+", type=Path)
    for folder in parser.parse_args(arguments).folder:
        try:
            print(pack(folder))
        except (NormforgeError, OSError) as error:
            print(f"pack: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
