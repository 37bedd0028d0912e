"""What processes are made of: frames between them, shared memory, isolation, limits, their ends."""
