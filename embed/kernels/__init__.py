"""Compiled code for CPUs and SparseCores that does what the engine defines, and changes no result."""
