"""Compiles training steps for devices that are not there, and reads the programs."""
