"""The one thing pyproject.toml cannot say: the C core is built by cffi."""

from setuptools import setup

setup(cffi_modules=["src/kvio/_native/build.py:ffibuilder"])
