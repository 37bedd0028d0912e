"""UNTRUSTED: the processes that run training.py. Started, not imported."""
