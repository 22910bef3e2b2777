"""One run without torch: its settings, run directory, status, logs, signals, watchdog, series for
experiment trackers, and its job in Slurm's queue.
"""
