"""The losses that miners import and validators score with. Needs torch and numpy alone."""
