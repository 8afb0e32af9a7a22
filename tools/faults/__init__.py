"""The fault table: real processes, one fault at one moment, and what was promised against what was seen.

``python -m tools.faults`` runs cells of the product of roles (:mod:`~tools.faults.roles`), faults
(:mod:`~tools.faults.faults`) and moments (:mod:`~tools.faults.moments`), and writes docs/fault-table.md.
"""
