"""One run without torch: its settings, run directory, status, logs, signals, watchdog, and its job
in Slurm's queue.
"""
