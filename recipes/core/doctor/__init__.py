"""Examines the nodes of an allocation, checks environment variables, and explains why a run failed.

`recipes/doctor.py` is the command. Only it may import this package. Besides gpucheck and linkcheck,
no module imports torch.
"""
