"""One file that many processes write, each its own part; see docs/sharedfile.md."""

from kvio.sharedfile.file import SharedFile
from kvio.sharedfile.layout import Extent, Missing
from kvio.sharedfile.planning import SharedFileOptions
from kvio.sharedfile.status import SharedFileStatus

__all__ = ["Extent", "Missing", "SharedFile", "SharedFileOptions", "SharedFileStatus"]
