"""`tune.py export`: a package in the form that other tools load."""

from __future__ import annotations

from generator.cli.arguments import CommandLine, folder_name
from generator.package.hub.export import export_package
from generator.paths import GENERATED
from generator.problem import RMSNORM_BACKWARD, SUMS
from generator.target import find_target


def export(argv: list[str]) -> int:
    """Raises NormforgeError."""
    parser = CommandLine(
        prog="tune.py export",
        description="Write a package as a repository of Hugging Face's kernels: get_kernel and "
        "kernelize load it, and it needs PyTorch alone.",
    )
    parser.add_argument(
        "--hf",
        type=folder_name,
        metavar="FOLDER",
        required=True,
        help="where it is written: a new or empty folder, or an earlier export, which it replaces",
    )
    parser.add_argument(
        "--gpu", help="the GPU that the package was tuned for (default: h200, or that of --out)"
    )
    parser.add_argument(
        "--op",
        choices=list(SUMS),
        default=RMSNORM_BACKWARD,
        help="the operation (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=folder_name, help="the output folder of the run (default: generated/<gpu>)"
    )
    args = parser.parse(argv)
    if args.gpu is not None:
        find_target(args.gpu)
    output = args.out or GENERATED / (args.gpu or "h200")
    table = export_package(output / args.op, args.hf, args.gpu)
    print(f"Repository: {args.hf}, for {table.target['title']}")
    return 0
