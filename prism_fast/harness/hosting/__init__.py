"""UNTRUSTED: imports a bundle's scripts under forced seeds; for the processes that run them, and for nobody else."""
