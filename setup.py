"""Stops a build from a clone without symbolic links; everything else stands in pyproject.toml."""

import runpy

from setuptools import setup

runpy.run_path("txl_lightning/_links.py")["check_links"]()
setup()
