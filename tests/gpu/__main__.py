"""Shows on one GPU that each GPU path works, and how fast it is: ``python -m tests.gpu [FILE.json] [only=NAME,…] [dry=true]``.

Prints a line for each check of `checks.CHECKS`, and writes their figures to FILE.json. dry=true: on the CPU, in small sizes, what a CPU
can do; the figures mean nothing. Needs the recipes' dependencies only, no network, and about nine minutes on a GPU with 16 CPUs.
Exit status: 0 if no check fails, 1 if one does, 2 for an invalid argument or without a GPU.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from recipes.core.config.declare import nearest
from tests.gpu import checks
from tests.gpu.checks import CHECKS, ROOT

LIMIT_S = 150.0  # for one check
TOGETHER = 4  # checks that measure no speed run at once


def main(argv: list[str]) -> int:
    words = dict(word.partition("=")[::2] for word in argv if "=" in word)
    files = [word for word in argv if "=" not in word]
    names = [name for name in words.get("only", "").split(",") if name] or list(CHECKS)
    strange = [*sorted(words.keys() - {"only", "dry"}), *(name for name in names if name not in CHECKS), *files[1:]]
    if strange:
        print(
            f"{strange[0]}: give FILE.json, only=NAME or dry=true; the names are {', '.join(CHECKS)}{nearest(strange[0], CHECKS)}"
        )
        return 2
    dry = words.get("dry") == "true"
    if not dry and not torch.cuda.is_available():
        print("torch sees no GPU: dry=true runs what a CPU can do")
        return 2
    report: dict[str, Any] = {"machine": checks.machine(dry), "checks": {}}
    print(json.dumps(report["machine"]), flush=True)
    together = [name for name in names if name not in checks.MEASURED]
    with ThreadPoolExecutor(1 if dry else TOGETHER) as pool:
        results = pool.map(lambda name: one(name, dry), together)
        alone = (one(name, dry) for name in names if name in checks.MEASURED)
        order = [*together, *(name for name in names if name in checks.MEASURED)]
        for name, found in zip(order, itertools.chain(results, alone), strict=True):
            report["checks"][name] = found
            figures = "  ".join(f"{key} {value}" for key, value in found.get("figures", {}).items())
            print(f"{found['result']:12} {name}: {CHECKS[name].__doc__}  {figures}{found.get('why', '')}", flush=True)
            if files:
                Path(files[0]).write_text(json.dumps(report, indent=1) + "\n")
    return int(any(found["result"] == "fail" for found in report["checks"].values()))


def one(name: str, dry: bool) -> dict[str, Any]:
    """The result of one check, in its own process: one that crashes or hangs does not stop the others."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.gpu.checks", name, folder, "cpu" if dry else "cuda"]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"result": "fail", "why": f"still running after {LIMIT_S:g} s"}
    last, seconds = (done.stdout.splitlines() or [""])[-1], round(time.monotonic() - begin, 1)
    if done.returncode == 0 and last.startswith("{"):
        return {**json.loads(last), "seconds": seconds}
    return {
        "result": "fail",
        "why": f"status {done.returncode}: {(done.stderr or done.stdout)[-3000:]}",
        "seconds": seconds,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
