"""The wheel: `normforge`, with every tuned package as `normforge.generated.<gpu>.<operation>`, and
the headers of their sources in `normforge/generated/include`.

With NORMFORGE_NATIVE=1 it also carries the extension of `use_native()`, compiled for the PyTorch
that is installed, and so is a wheel for one Python and platform.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

packages = find_packages(include=["normforge", "normforge.*"])
folders = {"normforge.generated": "generated"}
data = {
    "normforge": ["py.typed"],
    "normforge.native": ["*.cpp", "*.h"],
}
for table in sorted(Path("generated").glob("*/*/table.json")):
    package = ".".join(("normforge", *table.parent.parts))
    folders[package] = str(table.parent)
    data[package] = ["*.json", "*.xz", "kernels/*", "include/**/*"]
    for name in find_packages(str(table.parent)):  # those of a package that stands alone
        packages.append(f"{package}.{name}")
        data[f"{package}.{name}"] = ["*.cpp", "*.h"]


class Build(build_py):
    """Leaves nothing of an earlier build, whose files may be newer and others."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "normforge"), ignore_errors=True)
        super().run()
        if not self.editable_mode:
            include = Path(self.build_lib, "normforge", "generated", "include")
            include.mkdir(exist_ok=True)
            for header in [*Path("templates").rglob("*.cuh"), *Path("generated/include").iterdir()]:
                shutil.copy(header, include)

    def find_package_modules(self, package: str, folder: str) -> list[tuple[str, str, str]]:
        """Find the modules without the one that finds the packages in a checkout."""
        found = super().find_package_modules(package, folder)
        return [entry for entry in found if entry[:2] != ("normforge", "generated")]


class BuildNative(Build):
    """Compiles the extension."""

    def run(self) -> None:
        super().run()
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        try:
            from torch import version

            from normforge.native.build import prebuild

            if version.cuda is None and asked != "cpu":  # tests ask for the CPU
                raise RuntimeError("this PyTorch is not for CUDA: build with one that is")
            prebuild(Path(self.build_lib, "normforge", "native"))
        except ImportError as error:
            raise SystemExit(
                f"NORMFORGE_NATIVE={asked} compiles for the PyTorch that is installed ({error}): "
                "install it, and build with --no-build-isolation"
            ) from None
        except (RuntimeError, OSError) as error:
            raise SystemExit(f"NORMFORGE_NATIVE={asked}: {error}") from None


class OfOnePlatform(Distribution):
    def has_ext_modules(self) -> bool:
        return True


asked = os.environ.get("NORMFORGE_NATIVE", "0")
native = asked not in ("", "0")
setup(
    packages=[*packages, *folders],
    package_dir=folders,
    package_data=data,
    include_package_data=False,
    cmdclass={"build_py": BuildNative if native else Build},
    distclass=OfOnePlatform if native else Distribution,
)
