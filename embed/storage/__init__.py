"""Stored arrays as tables: made, read with their rows in order, loaded, and compared.

A **view** is how a logical table is split where users and checkpoints see it.
"""
