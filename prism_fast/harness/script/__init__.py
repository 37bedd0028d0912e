"""Reading a bundle's scripts without running them: see `walk.Walk`."""

from prism_fast.harness.script.source import Script
from prism_fast.harness.script.state import Observer, Site, TooLarge
from prism_fast.harness.script.walk import Walk

__all__ = ["Observer", "Script", "Site", "TooLarge", "Walk"]
