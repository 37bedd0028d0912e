"""The harness: a folder is a process or a layer (docs/security.md)."""
