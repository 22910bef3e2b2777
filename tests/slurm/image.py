"""Builds env/apptainer.def into an image for tests/slurm/test_apptainer.py. Needs root, a network,
debootstrap and Apptainer.

    sudo python3 tests/slurm/image.py /var/tmp/recipes.sif
    export RECIPES_TEST_IMAGE=/var/tmp/recipes.sif
    sudo --preserve-env .venv/bin/python -m pytest tests/slurm/test_apptainer.py

Two things differ from `apptainer build recipes.sif env/apptainer.def`. The base is a Debian made by
debootstrap, with Debian's Python, so that no container registry is needed. And the image sets
variables that a test sets too, to see which value wins.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEBIAN = "trixie"
BASE_PACKAGES = "python3,python3-pip,ca-certificates"
SETS = {"NCCL_IB_TIMEOUT": "image", "NCCL_DEBUG": "image", "IMAGE_ONLY": "image"}
# This machine's package index and certificates, where it has its own configuration.
PIP = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
# All of root's capabilities, also where the root of this machine lacks one.
AS_ROOT = ("unshare", "--user", "--map-users=0,0,65536", "--map-groups=0,0,65536")


def definition(base: Path) -> str:
    """env/apptainer.def on ``base``, with the variables SETS."""
    text = (ROOT / "env/apptainer.def").read_text()
    text, replaced = re.subn(
        r"^Bootstrap: .*\nFrom: .*$",
        f"Bootstrap: localimage\nFrom: {base}",
        text,
        flags=re.MULTILINE,
    )
    assert replaced == 1
    return f"{text}\n%environment\n" + "".join(
        f"    export {name}={value}\n" for name, value in SETS.items()
    )


def make_base(base: Path) -> None:
    """A Debian with Python, of which pip may change all, as that of Docker's images named
    python.
    """
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", DEBIAN, str(base)],
        check=True,
    )
    for device in (base / "dev").iterdir():
        shutil.rmtree(device) if device.is_dir() and not device.is_symlink() else device.unlink()
    for marker in base.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()
    (base / "etc/pip.conf").touch()


def build(image: Path) -> None:
    """Makes ``image``; nothing happens where it was made from the same files."""
    sources = "".join(
        (ROOT / name).read_text()
        for name in ("env/apptainer.def", "tested-versions.txt", "tests/slurm/image.py")
    )
    made_from = image.with_suffix(".sources")
    if image.exists() and made_from.exists() and made_from.read_text() == sources:
        return
    with tempfile.TemporaryDirectory(dir=image.parent) as folder:
        make_base(Path(folder, "base"))
        Path(folder, "recipes.def").write_text(definition(Path(folder, "base")))
        binds = [word for path in PIP if Path(PIP[0]).exists() for word in ("--bind", path)]
        squashfs = ["--mksquashfs-args", "-comp zstd -Xcompression-level 1"]  # the quickest
        subprocess.run(
            [
                *AS_ROOT,
                "apptainer",
                "build",
                "--force",
                *binds,
                *squashfs,
                str(image),
                f"{folder}/recipes.def",
            ],
            cwd=ROOT,
            env={**os.environ, "APPTAINER_TMPDIR": folder},
            check=True,
        )
    made_from.write_text(sources)


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
