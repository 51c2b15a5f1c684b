"""Compiled code for CPUs and SparseCores: it does what the engine defines."""
