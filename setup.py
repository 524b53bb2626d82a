"""The wheel: `normforge`, with every tuned package as `normforge.generated.<gpu>.<operation>`.

With NORMFORGE_NATIVE=1 it also carries the extension of `use_native()`, compiled for the PyTorch
that is installed, and so is a wheel for one Python and platform.
"""

import os
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

packages, folders, data = ["normforge"], {}, {"normforge": ["py.typed"]}
for table in sorted(Path("generated").glob("*/*/table.json")):
    folder = table.parent
    package = ".".join(("normforge", *folder.parts))
    folders[package] = str(folder)
    packages += [package, *(f"{package}.{name}" for name in find_packages(str(folder)))]
    data[package] = ["py.typed", "*.json", "*.xz", "include/**/*", "kernels/*"]
    data[f"{package}.runtime.native"] = ["*.cpp", "*.h"]


class BuildNative(build_py):
    """Compiles the extension, once for all packages."""

    def run(self) -> None:
        super().run()
        sys.path.insert(0, next(iter(folders.values())))
        try:
            from runtime.native.build import prebuild
            from torch import version

            if version.cuda is None and asked != "cpu":  # which the tests ask for
                raise RuntimeError("this PyTorch is not for CUDA: build with one that is")
            prebuild(Path(self.build_lib, "normforge", "generated"))
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


native = {"cmdclass": {"build_py": BuildNative}, "distclass": OfOnePlatform}
asked = os.environ.get("NORMFORGE_NATIVE", "0")
setup(
    packages=packages,
    package_dir=folders,
    package_data=data,
    include_package_data=False,
    **({} if asked in ("", "0") else native),
)
