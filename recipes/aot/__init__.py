"""Compiles a recipe's step for devices that are not there, and reads the program."""
