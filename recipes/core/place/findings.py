"""What is wrong with a node, in a line, and its mend. Standard library only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """what: the matter, in a line that can stand behind a host's name. mend: what to type or do.

    bad: training cannot work, or not well. leave_out: that it does without this node; where it is the job's own fault, it does not.
    """

    what: str
    mend: str
    bad: bool = True
    leave_out: bool = True
