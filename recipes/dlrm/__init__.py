"""Click prediction with DLRM and DCN-V2: `python -m recipes.dlrm --config=... --workdir=...`."""
