"""The packages of a wheel; everything else about it is in pyproject.toml.

Folders of such common names must not lie among installed packages, where they would hide those of
others, or be hidden. A wheel has them in a folder of their own, which attnbench.py searches.
"""

from setuptools import find_namespace_packages, setup

FOLDERS = ("conf", "harness", "kernels", "models", "parallel", "sweeps")
INSTALLED = "attnbench_folders"

names = find_namespace_packages(include=[f"{folder}*" for folder in FOLDERS])
setup(
    packages=[f"{INSTALLED}.{name}" for name in names],
    package_dir={f"{INSTALLED}.{folder}": folder for folder in FOLDERS},
    py_modules=["attnbench"],
)
