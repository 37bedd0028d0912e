"""The process that predicts. Started, not imported."""
