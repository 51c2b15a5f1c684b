"""The user's own table, prepared for the recipes."""
