from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from recipes.core.errors import ConfigError
from recipes.core.slurm.hostlist import expand, expand_counts
from tests import helpers

LISTS = {
    "alpha,beta,gamma": "alpha beta gamma",
    "n[008-011]": "n008 n009 n010 n011",
    "n[08-10,3]": "n08 n09 n10 n3",
    "n[08-9]": "n08 n09",
    "rack[1-2]n[1-3]": "rack1n1 rack1n2 rack1n3 rack2n1 rack2n2 rack2n3",
    "r[1-2]n[3-4].site-a.org,login_1": (
        "r1n3.site-a.org r1n4.site-a.org r2n3.site-a.org r2n4.site-a.org login_1"
    ),
    "b[3,1],a2": "b3 b1 a2",
    "[1-3]": "1 2 3",
    "n[000000000000000001]": "n000000000000000001",
}


def test_a_host_list_is_expanded() -> None:
    assert {text: " ".join(expand(text)) for text in LISTS} == LISTS


def test_slurm_expands_the_same_lists_to_the_same_hosts(tmp_path: Path) -> None:
    """`scontrol show hostnames` needs no controller. Slurm 22.05 refuses text behind a bracket."""
    helpers.need(
        "" if shutil.which("scontrol") else "scontrol is not there: apt-get install slurm-client"
    )
    (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=localhost\n")
    environ = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    for text, hosts in LISTS.items():
        asked = subprocess.run(
            ["scontrol", "show", "hostnames", text], env=environ, capture_output=True, text=True
        )
        behind_bracket = "]-" in text or "]." in text
        assert asked.stdout.split() == hosts.split() or (behind_bracket and not asked.stdout), text


def test_a_range_may_be_as_long_as_slurm_allows() -> None:
    assert len(expand("n[1-65536]")) == 65_536


def test_counts_are_expanded() -> None:
    assert expand_counts("8,2(x3),4(x1)") == [8, 2, 2, 2, 4]


NOT_A_NAME = "is not a host name"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *(
            (text, NOT_A_NAME)
            for text in (
                "",
                "a,,b",
                "n[1-2",
                "n[1,2",
                "n1-2]",
                "n[1,[2]]",
                "n[]",
                "n[1-2-3]",
                "n[-2]",
            )
        ),
        *(
            (text, NOT_A_NAME)
            for text in ("n[١-٣]", f"n[1-{'9' * 5000}]", "a b", "a\n", "a\x00b", "(null)", "$(id)")
        ),
        ("n[3-1]", "ends before it begins"),
        ("n[0-999999999999999999]", "more than 65,536"),
        ("n[1-65537]", "more than 65,536"),
    ],
)
def test_an_invalid_host_list_is_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(text)
    message = str(caught.value)
    assert reason in message
    assert message.isprintable()
    assert len(message) < 400


@pytest.mark.parametrize(
    "text", ["", "a", "2(x3", "-1", "2,,1", " 2", "2\n", "0(x2)", "2(x0)", "1" * 999]
)
def test_invalid_counts_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="is neither a count") as caught:
        expand_counts(text)
    assert str(caught.value).isprintable()
