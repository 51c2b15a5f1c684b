"""Next-item recommendation: `python -m recipes.sequence --config=... --workdir=...`."""
