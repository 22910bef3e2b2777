"""Stands for a training, without torch, whose import takes seconds on each rank. The ranks keep in
step through files.

After SIGTERM, SIGUSR1 or SIGUSR2 all ranks agree to stop, rank 0 saves, and all exit with 0.
"""

import os
import signal
import time

from protocol import RUN_DIR, options, record, steps

RANK = int(os.environ["RANK"])
RANKS = int(os.environ["WORLD_SIZE"])


def stop_is_agreed(step: int, stopped: bool, timeout_s: float) -> bool:
    """Whether a rank has been asked to stop. Waits for the votes of all ranks."""
    unfinished = RUN_DIR / f"unfinished.{RANK}"
    unfinished.write_text("stop" if stopped else "continue")
    unfinished.rename(RUN_DIR / f"vote{step}.{RANK}")
    votes = [RUN_DIR / f"vote{step}.{rank}" for rank in range(RANKS)]
    deadline = time.monotonic() + timeout_s
    while not all(vote.exists() for vote in votes):
        if time.monotonic() > deadline:
            raise TimeoutError("lost a peer")
        time.sleep(0.02)
    return any(vote.read_text() == "stop" for vote in votes)


def main() -> None:
    args = options()
    stopped = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: stopped.append(1))

    step = max(steps("saved"), default=0)
    record("begin", step)
    stopping = False
    while step < args.steps and not stopping:
        step += 1
        record("step", step)
        time.sleep(args.pace)
        # a peer that has exited is noticed at once, as a broken connection would be
        stopping = stop_is_agreed(step, bool(stopped), 3 if args.fault == "exit" else 60)
    if stopping and RANK == 0:
        record("saved", step)


if __name__ == "__main__":
    main()
