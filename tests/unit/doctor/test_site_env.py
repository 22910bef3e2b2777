"""The proposed lines of an env file: only what the node's network requires, each with its reason."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recipes.core.config import envfile
from recipes.core.doctor.site_env import env_lines
from recipes.core.doctor.variables import problems

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
VALUES = st.one_of(TEXT, st.sampled_from(["1", "^", "=", ",", "::1", "fd00::1", "10.0.0.1", "4: ACTIVE", "InfiniBand"]))


def port(state: str = "4: ACTIVE", link: str = "InfiniBand") -> dict[str, str]:
    return {"state": state, "link": link, "rate": "400 Gb/sec (4X NDR)"}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (env_lines("eth0", {}, "10.0.0.1"), {}),
        (env_lines("ib0", {"mlx5_0:1": port(), "mlx5_1:1": port()}, "10.0.0.1"), {}),
        # NCCL passes over a port that is down.
        (env_lines("ib0", {"mlx5_0:1": port(), "mlx5_1:1": port("1: DOWN", "Ethernet")}, "10.0.0.1"), {}),
        (env_lines("ib0", {"mlx5_0:1": port("1: DOWN")}, "10.0.0.1"), {}),
        (env_lines("eth0", {"mlx5_0:1": port(link="Ethernet")}, "10.0.0.1"), {}),
        (
            env_lines(
                "ib0", {"mlx5_1:1": port(), "mlx5_0:1": port(), "mlx5_bond_0:1": port(link="Ethernet")}, "10.0.0.1"
            ),
            {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"},
        ),
        (env_lines("eth0", {}, "fd00::1", ["10.0.0.1", "fd00::1"]), {"NCCL_SOCKET_FAMILY": "AF_INET6"}),
        (env_lines("eth0", {}, "fd00::1", ["fd00::1", "fe80::1%eth0"]), {}),
        (env_lines("eth0", {}, "10.0.0.1", ["10.0.0.1", "fd00::1"]), {}),
        (
            env_lines("eth0", {}, "10.0.0.1", proven=False),
            {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"},
        ),
        (env_lines("lo", {}, "127.0.0.1", proven=False), {}),
    ],
)
def test_only_required_lines_are_proposed_each_with_its_reason(lines: list[str], expected: dict[str, str]) -> None:
    assert envfile.parse("\n".join(lines), "proposal") == expected
    assert lines
    assert len([line for line in lines if line.startswith("#")]) == max(1, len(expected))
    assert all(len(line) <= 120 for line in lines)


def test_the_proposed_lines_have_no_problem() -> None:
    ports = {"mlx5_0:1": port(), "mlx5_bond_0:1": port(link="Ethernet")}
    lines = env_lines("ib0", ports, "fd00::1", ["10.0.0.1"], proven=False)
    parsed = envfile.parse("\n".join(lines), "proposal")
    assert len(parsed) == 4
    assert problems(parsed) == []


@given(
    TEXT,
    st.dictionaries(TEXT, st.dictionaries(st.sampled_from(["state", "link", "rate"]), VALUES)),
    VALUES,
    st.lists(VALUES, max_size=3),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
@example("eth0", {"a\n:1": port(), "b:1": port(link="Ethernet")}, "fd00::1", ["10.0.0.1"], False)
def test_any_proposal_can_be_read(
    interface: str, ports: dict[str, dict[str, str]], address: str, others: list[str], proven: bool
) -> None:
    envfile.parse("\n".join(env_lines(interface, ports, address, others, proven)), "proposal")
