"""Committed state."""
