"""The harness: referee (trusted) and runner (runs the bundle), and what passes between them (harness.md)."""
