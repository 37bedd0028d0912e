"""UNTRUSTED: imports architecture.py and writes programs; sees no text. Started, not imported."""
