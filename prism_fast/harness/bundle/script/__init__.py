"""Reading a bundle's scripts without running them: see `walk.Walk`."""

from prism_fast.harness.bundle.script.source import Script
from prism_fast.harness.bundle.script.state import Observer, Site, TooLarge
from prism_fast.harness.bundle.script.walk import Walk

__all__ = ["Observer", "Script", "Site", "TooLarge", "Walk"]
