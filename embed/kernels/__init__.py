"""Compiled code for accelerators, which implements operations of the engine."""
