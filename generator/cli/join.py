"""`tune.py join`: one folder of results from several, which machines wrote that share nothing."""

from __future__ import annotations

from pathlib import Path

from generator.cli.arguments import CommandLine, folder_name
from generator.errors import NormforgeError


def join(argv: list[str]) -> int:
    """Raises NormforgeError."""
    parser = CommandLine(
        prog="tune.py join",
        description="Add the studies and packages of some folders of results to those of another "
        "folder. Trials that it has already are left out. The later one of two winners of a shape "
        "stands, and goes into the package.",
    )
    parser.add_argument(
        "folders", nargs="+", type=folder_name, metavar="FOLDER", help="an --out of a run"
    )
    parser.add_argument(
        "--into", required=True, type=folder_name, metavar="FOLDER", help="the folder that grows"
    )
    args = parser.parse(argv)
    from generator.package.join import check_joinable, join_package
    from generator.studies.excerpt import read_journal
    from generator.studies.reader import describe_location
    from generator.studies.storage import JOURNAL_NAME, open_storage
    from generator.studies.study_log import StudyLog
    from generator.tuner.lifecycle import exclusive_run
    from normforge.table import TABLE

    into: Path = args.into
    places = [Path(describe_location(folder)) for folder in args.folders]
    for folder, place in zip(args.folders, places, strict=True):
        if folder.resolve() == into.resolve():
            raise NormforgeError(f"{folder} cannot be joined into itself: name another --into")
        if not place.exists():
            raise NormforgeError(f"{folder} has no {JOURNAL_NAME}: name the --out of a run")
    with exclusive_run(into, option="--into"):
        journals = [read_journal(place) for place in places]
        storage = open_storage(into / JOURNAL_NAME)
        check_joinable(args.folders, into, [*journals, storage])
        for folder, others in zip(args.folders, journals, strict=True):
            names = [study.study_name for study in others.get_all_studies()]
            came = sum(StudyLog(storage, name).join(StudyLog(others, name)) for name in names)
            print(f"{folder}: {came} trials in {len(names)} studies")
            for package in sorted(table.parent for table in folder.glob(f"*/{TABLE}")):
                kernels, replaced = join_package(package, into / package.name)
                bits = f"; the bits of these may change: {', '.join(replaced)}" if replaced else ""
                print(f"{package}: {kernels} kernels{bits}")
    return 0
