"""TRUSTED: runs programs on text and marks them. Imports nothing of a bundle. Started, not imported."""
