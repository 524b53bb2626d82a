"""The wheel: `normforge`, with every tuned package as `normforge.generated.<gpu>.<operation>`."""

from pathlib import Path

from setuptools import find_packages, setup

packages, folders, data = ["normforge"], {}, {"normforge": ["py.typed"]}
for table in sorted(Path("generated").glob("*/*/table.json")):
    folder = table.parent
    package = ".".join(("normforge", *folder.parts))
    folders[package] = str(folder)
    packages += [package, *(f"{package}.{name}" for name in find_packages(str(folder)))]
    data[package] = ["*.json", "*.zip", "include/**/*", "kernels/*"]
    data[f"{package}.runtime.native"] = ["*.cpp", "*.h"]

setup(packages=packages, package_dir=folders, package_data=data, include_package_data=False)
