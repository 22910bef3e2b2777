"""All code that is specific to Slurm: the output of its commands, the variables of a job and of a
step, and the batch script. Standard library only.

No other package reads a variable of Slurm or calls one of its commands, except the `scontrol` that
programs find in program/hook.
"""
