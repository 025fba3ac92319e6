"""The comparisons of the README as code: what is run, how it is recorded, tabled and plotted.

Each experiment is a module that is run by ``python -m kvio.experiments.NAME``.
"""

from __future__ import annotations
