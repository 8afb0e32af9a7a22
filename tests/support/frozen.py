"""Imported last by the process that all others are forks of: what it has imported is no garbage.

A collection in a fork would pass over a million objects of torch, and copy the memory that it shares.
"""

import gc

gc.collect()
gc.freeze()
