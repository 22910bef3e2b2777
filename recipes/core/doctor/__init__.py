"""Examining nodes, and explaining why a run failed. The tool recipes.doctor imports it."""
