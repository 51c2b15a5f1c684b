"""Compiled code for SparseCores, which implements operations of the engine."""
