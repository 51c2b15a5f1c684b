"""Compiled code for CPUs and SparseCores: it does what the engine defines.

The `__init__` of each package chooses where its kernels are used.
"""
