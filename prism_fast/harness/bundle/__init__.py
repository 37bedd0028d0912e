"""Reads a bundle's scripts and checks them; runs nothing."""
