"""A program of the user as the ranks of a run: its start, the signals that it gets, and how it
ends. Never torch.

``recipes/script.py`` imports this package. Each rank, or with ``through=`` each node, has one
wrapper process, which starts the program and lives as long as it. The folder ``hook`` is for the
processes of the program: they load it, and nothing here imports it.
"""
