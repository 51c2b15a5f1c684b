"""Programs that train recommenders on `embed`; `python -m recipes` lists them.

Installed from a wheel the package is called `embed.recipes`, so its files import each other by
relative names.
"""
