"""Starts processes from settings: the job, its script, submission, ranks on this machine, steps of
the batch shell.

Recipes do not import this package.
"""
