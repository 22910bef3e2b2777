"""What the programs in this folder share: their options, and the file in which rank 0 records its
steps.

Rank 0 appends lines to $RECIPES_RUN_DIR/steps.txt:

    begin N    training starts at step N: 0, or the step of the checkpoint that it resumes from
    step N     the optimiser step N is complete
    saved N    the checkpoint of step N is complete
"""

import argparse
import os
import signal
from pathlib import Path

RUN_DIR = Path(os.environ["RECIPES_RUN_DIR"])
FAULT: list[str] = []


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100, help="steps; a resumed run does 10 more")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds to sleep in each step")
    parser.add_argument("--save-every", type=int, default=0, help="0: save only before a stop")
    parser.add_argument(
        "--fault", choices=["raise", "kill", "exit", "memory"], help="of rank 1 at step 5"
    )
    parser.add_argument("--jit", action="store_true", help="trainer: enable_jit_checkpoint")
    parser.add_argument("--cpu", action="store_true", help="trainer, accelerate: choose the CPU")
    args = parser.parse_args()
    FAULT.append(args.fault)
    saved = steps("saved")
    if saved:
        args.steps = saved[-1] + 10
    return args


def steps(event: str) -> list[int]:
    """The steps of the recorded events of this kind."""
    file = RUN_DIR / "steps.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return [int(line.split()[1]) for line in lines if line.split()[0] == event]


def record(event: str, step: int) -> None:
    if (event, step, os.environ.get("RANK")) == ("step", 5, "1"):
        fail(FAULT[0])
    if os.environ.get("RANK", "0") == "0":
        with open(RUN_DIR / "steps.txt", "a") as file:
            file.write(f"{event} {step}\n")


def fail(fault: str) -> None:
    if fault == "raise":
        raise ValueError("bad data")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "memory":
        blocks = []
        while True:
            blocks.append(bytearray(b"x" * (32 << 20)))
    if fault == "exit":
        os._exit(0)
