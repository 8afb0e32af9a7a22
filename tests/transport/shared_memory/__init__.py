"""Shared memory: the pure parts against models, the others against the system and against bad peers."""
