"""Files: where the project lies, atomic writes, private folders. Standard library only."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of this clone, or of a job's copy of it
