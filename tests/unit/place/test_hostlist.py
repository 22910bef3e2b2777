from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.core.errors import shown
from recipes.core.place.hostlist import HostListError, expand, expand_counts
from tests import helpers

LISTS = {
    "node1": "node1",
    "alpha,beta,gamma": "alpha beta gamma",
    "n[1-3,5]": "n1 n2 n3 n5",
    "n[9-11]": "n9 n10 n11",
    "n[008-011]": "n008 n009 n010 n011",
    "n[08-10,3]": "n08 n09 n10 n3",
    "n[08-9]": "n08 n09",
    "rack[1-2]n[1-3]": "rack1n1 rack1n2 rack1n3 rack2n1 rack2n2 rack2n3",
    "rack1n[1-2],rack2n[1-2]": "rack1n1 rack1n2 rack2n1 rack2n2",
    "n[1-2]-ib": "n1-ib n2-ib",
    "r[1-2]n[3-4].site-a.org,login_1": "r1n3.site-a.org r1n4.site-a.org r2n3.site-a.org r2n4.site-a.org login_1",
    "b[3,1],a2": "b3 b1 a2",
    "a1,a1,n[2,2]": "a1 a1 n2 n2",
    "[1-3]": "1 2 3",
    "n[000000000000000001]": "n000000000000000001",
}


def test_a_host_list_is_expanded() -> None:
    assert {text: " ".join(expand(text)) for text in LISTS} == LISTS


def test_slurm_expands_the_same_lists_to_the_same_hosts(tmp_path: Path) -> None:
    """`scontrol show hostnames` needs no controller. Slurm 22.05 refuses text behind a bracket."""
    helpers.need("" if shutil.which("scontrol") else "scontrol is not there: apt-get install slurm-client")
    (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=localhost\n")
    environ = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    for text, hosts in LISTS.items():
        asked = subprocess.run(["scontrol", "show", "hostnames", text], env=environ, capture_output=True, text=True)
        behind_bracket = "]-" in text or "]." in text
        assert asked.stdout.split() == hosts.split() or (behind_bracket and not asked.stdout), text


@pytest.mark.parametrize(
    ("text", "counts"), [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("8,2", [8, 2]), ("4(x1),2(x2)", [4, 2, 2])]
)
def test_counts_are_expanded(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("a,,b", "empty"),
        ("n[1-2", "`[` without `]`"),
        ("n1-2]", "`]` without `[`"),
        ("n[1,[2]]", "inside brackets"),
        ("n[]", "neither a number"),
        ("n[1-2-3]", "neither a number"),
        ("n[-2]", "neither a number"),
        ("n[١-٣]", "neither a number"),
        ("n[1-" + "9" * 5000 + "]", "neither a number"),
        ("n[3-1]", "backwards"),
        ("a b", "character"),
        ("a\n", "character"),
        ("a\x00b", "character"),
        ("(null)", "character"),
        ("$(id)", "character"),
        ("n[1-65537]", "more than 65,536"),
        ("n[0-999999999999999999]", "more than 65,536"),
        (",".join(["n[1-40000]"] * 2), "more than 65,536"),
        ("n" * 256, "more than 255 characters"),
        ("n" * 100_000 + "[1-65536]", "more than 255 characters"),
        ("n[" + "0" * 17 + "1]" + "x" * 237, "more than 255 characters"),
    ],
)
def test_an_invalid_host_list_is_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(HostListError) as caught:
        expand(text)
    message = str(caught.value)
    assert reason in message
    assert len(message.splitlines()) == 1
    assert len(message) < 400
    assert message.startswith(f"host list '{shown(text)[:40]}")


@pytest.mark.parametrize(
    "text",
    ["", "a", "2(x3", "2(3)", "2(x)", "-1", "2,,1", " 2", "2\n", "0", "0(x2)", "2(x0)", "1.5", "2(x65537)", "1" * 5000],
)
def test_invalid_counts_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(HostListError) as caught:
        expand_counts(text)
    assert len(str(caught.value).splitlines()) == 1
    assert "counts " in str(caught.value)


_BLOCK = st.tuples(st.integers(0, 1200), st.integers(0, 12), st.integers(1, 5))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["n", "rack1n", "a-b"]), _BLOCK), min_size=1, max_size=6))
def test_expand_is_the_inverse_of_writing_ranges(blocks: list[tuple[str, tuple[int, int, int]]]) -> None:
    text = ",".join(f"{name}[{low:0{width}}-{low + more:0{width}}]" for name, (low, more, width) in blocks)
    hosts = [f"{name}{low + i:0{width}}" for name, (low, more, width) in blocks for i in range(more + 1)]
    assert expand(text) == hosts
