"""Compiled code for SparseCores, which does what the engine defines."""
