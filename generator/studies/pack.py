"""Studies packed for a repository: a quarter smaller than `xz` alone makes them.

    python -m generator.studies.pack generated/h200

Writes studies.journal.xz of a folder and removes its studies.journal; the next run unpacks it. Of
all records only the last keeps its seal, which covers those before it (see journal.py), and the
times at which trials began and ended keep whole seconds.
"""

from __future__ import annotations

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

_DATES = ("datetime_start", "datetime_complete")


def pack(folder: Path) -> Path:
    """Pack the studies of a folder, and return the file. Raises NormforgeError when there are none,
    or when they are corrupt, and OSError; then the folder is as it was."""
    journal = folder / JOURNAL_NAME
    if not journal.exists() or not journal.stat().st_size:
        raise NormforgeError(f"no {JOURNAL_NAME} in {folder}: nothing to pack")
    SealedJournal(journal)  # checks all seals
    packed = journal.with_name(f"{JOURNAL_NAME}.xz")
    with replacing(packed) as part:
        last: dict[str, Any] = {}
        with journal.open() as records, part.open("w") as to:
            for record in records:
                if last:
                    to.write(json.dumps(last, separators=(",", ":")) + "\n")
                last = _short(record)
        SealedJournal(part).append_logs([last])
        part.write_bytes(lzma.compress(part.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
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


if __name__ == "__main__":
    for name in sys.argv[1:]:
        try:
            print(pack(Path(name)))
        except (NormforgeError, OSError) as error:
            sys.exit(f"pack: {error}")
