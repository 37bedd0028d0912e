"""Reading a bundle's scripts without running them: see `walk.Walk`."""

from prism_fast.harness.bundle.script.source import Script, on_a_fresh_stack
from prism_fast.harness.bundle.script.state import Budget, Observer, Site, TooLarge
from prism_fast.harness.bundle.script.walk import Walk

__all__ = ["Budget", "Observer", "Script", "Site", "TooLarge", "Walk", "on_a_fresh_stack"]
