"""Programs that train recommenders on `embed`: run one as `python -m recipes.<name>`."""
