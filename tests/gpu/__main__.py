"""Shows that each GPU path works, and how fast it is: ``python -m tests.gpu [FILE.json]
[only=NAME,…] [gpus=true] [dry=true]``.

Prints a line for each check of `checks`, or with gpus=true of `several`, and writes their figures
to FILE.json. dry=true: on the CPU, in small sizes, what a CPU can do; the figures mean nothing.
Needs the recipes' dependencies only, no network, and about nine minutes on a GPU with 16 CPUs. Exit
status: 0 if no check fails, 1 if one does, 2 for an invalid argument or without a GPU.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from recipes.core.config.declare import nearest
from tests.gpu import table
from tests.gpu.place import ROOT

LIMIT_S = 240.0  # for one check
CONCURRENT = 4  # checks that measure no speed


def main(argv: list[str]) -> int:
    words = dict(word.partition("=")[::2] for word in argv if "=" in word)
    files = [word for word in argv if "=" not in word]
    known = table.OF_SEVERAL if words.get("gpus") == "true" else table.OF_ONE
    names = [name for name in words.get("only", "").split(",") if name] or list(known)
    no_switch = [
        f"{word}={words[word]}"
        for word in ("dry", "gpus")
        if words.get(word, "true") not in ("true", "false")
    ]
    no_key = sorted(words.keys() - {"only", "dry", "gpus"})
    strange = [*no_key, *no_switch, *(name for name in names if name not in known), *files[1:]]
    if strange:
        usage = "give FILE.json, only=NAME, gpus=true or dry=true; the names are"
        print(f"{strange[0]}: {usage} {', '.join(known)}{nearest(strange[0], known)}")
        return 2
    dry = words.get("dry") == "true"
    if not dry and not torch.cuda.is_available():
        print("torch sees no GPU: dry=true runs what a CPU can do")
        return 2
    report: dict[str, Any] = {
        "date": f"{datetime.date.today()}",
        "machine": table.machine(dry),
        "checks": {},
    }
    print(json.dumps(report["machine"]), flush=True)
    together = [name for name in names if name not in table.MEASURED]
    with ThreadPoolExecutor(1 if dry else CONCURRENT) as pool:
        results = pool.map(lambda name: one(name, dry), together)
        alone = (one(name, dry) for name in names if name in table.MEASURED)
        order = [*together, *(name for name in names if name in table.MEASURED)]
        for name, result in zip(order, itertools.chain(results, alone), strict=True):
            report["checks"][name] = result
            figures = "  ".join(
                f"{key} {value}" for key, value in result.get("figures", {}).items()
            )
            print(
                (
                    f"{result['result']:12} {name}: {known[name].__doc__}  "
                    f"{figures}{result.get('why', '')}"
                ),
                flush=True,
            )
            if files:
                Path(files[0]).write_text(json.dumps(report, indent=1) + "\n")
    return int(any(result["result"] == "fail" for result in report["checks"].values()))


def one(name: str, dry: bool) -> dict[str, Any]:
    """The result of one check, in its own process: one that crashes or hangs does not stop the
    others.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.gpu.table", name, folder, "cpu" if dry else "cuda"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **pipes)
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the recipes that it has started, too
            process.communicate()
            return {"result": "fail", "why": f"still running after {LIMIT_S:g} s"}
    last = (out.splitlines() or [""])[-1]
    seconds = round(time.monotonic() - begin, 1)
    if process.returncode == 0 and last.startswith("{"):
        return {**json.loads(last), "seconds": seconds}
    return {
        "result": "fail",
        "why": f"status {process.returncode}: {(err or out)[-3000:]}",
        "seconds": seconds,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
