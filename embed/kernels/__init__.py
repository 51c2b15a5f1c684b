"""Compiled code that does what the engine defines, where a device has it. It changes no result."""
