"""What the processes of a program get in PYTHONPATH (this folder) and in PATH (``bin``)."""
