"""A run: its folder, its loop, its checkpoints, and how it resumes."""
