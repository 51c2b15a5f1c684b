"""Programs that train recommenders on `embed`; `python -m recipes` lists them."""
