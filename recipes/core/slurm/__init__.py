"""All that knows Slurm: what its commands answer, the variables of a job and of a step, and the
batch script. Standard library only.

No other package reads a variable of Slurm or calls one of its commands.
"""
