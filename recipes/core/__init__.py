"""Launching, checkpoints, requeueing and failure reports, shared by all recipes.
docs/architecture.md shows the packages.
"""
