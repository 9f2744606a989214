"""The packages of an installation: everything under one name, ``draftconf``. The rest is in pyproject.toml."""

from setuptools import find_packages, setup

folders = find_packages(include=["reference*", "fast*", "conformance*"])
setup(packages=["draftconf", *(f"draftconf.{folder}" for folder in folders)])
