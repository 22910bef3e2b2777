"""Time limits as Slurm reads and prints them. Standard library only."""

import math
import re

# The forms of sbatch's --time. squeue and scontrol print [D-]HH:MM:SS or MM:SS, which are two of
# them.
PATTERN = r"\d{1,7}|\d{1,6}:\d{2}|\d{1,5}:\d{2}:\d{2}|\d{1,4}-\d{1,2}(:\d{2}){0,2}"
FORM = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"


def seconds(text: str) -> float | None:
    """The seconds of a time limit. UNLIMITED gives inf; text in no form of Slurm's (NOT_SET) gives
    None.
    """
    if text == "UNLIMITED":
        return math.inf
    if not re.fullmatch(PATTERN, text, re.ASCII):
        return None
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not dash and len(parts) < 3:
        parts.insert(0, 0)  # the first part is minutes
    hours, minutes, secs = parts + [0] * (3 - len(parts))
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs)
