"""Stored arrays as tables: made, read with their rows in order, loaded, and compared.

A **view** is the split of a logical table as users and checkpoints see it.
"""
