"""Tools that tests share: leak checks, real processes, fresh interpreters, messages drawn at random."""
