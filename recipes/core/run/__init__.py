"""The life of one run without torch: its settings, directory and status, its logs, signals and watchdog, its job in Slurm's queue."""
