"""Argument parsing and printing. No logic, and nothing heavy imported before a command runs."""
