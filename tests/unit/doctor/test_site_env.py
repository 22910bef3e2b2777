"""The proposed lines of an env file: only what the node's network requires, each with its reason."""

from __future__ import annotations

import pytest

from recipes.core.config import envfile
from recipes.core.doctor.site_env import env_lines
from recipes.core.doctor.variables import problems


def port(state: str = "ACTIVE", link: str = "InfiniBand") -> dict[str, str]:
    return {"state": state, "link": link}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (env_lines({}, "", []), {}),
        (env_lines({"mlx5_0:1": port(), "mlx5_1:1": port()}, "10.0.0.1", []), {}),
        # NCCL passes over a port that is down.
        (env_lines({"mlx5_0:1": port(), "mlx5_1:1": port("DOWN", "Ethernet")}, "10.0.0.1", []), {}),
        (env_lines({"mlx5_0:1": port("DOWN")}, "10.0.0.1", []), {}),
        (env_lines({"mlx5_0:1": port(link="Ethernet")}, "10.0.0.1", []), {}),
        (
            env_lines({"mlx5_1:1": port(), "mlx5_0:1": port(), "mlx5_bond_0:1": port(link="Ethernet")}, "10.0.0.1", []),
            {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"},
        ),
        (env_lines({}, "fd00::1", ["10.0.0.1", "fd00::1"]), {"NCCL_SOCKET_FAMILY": "AF_INET6"}),
        (env_lines({}, "fd00::1", ["fd00::1", "fe80::1%eth0"]), {}),
        (env_lines({}, "10.0.0.1", ["10.0.0.1", "fd00::1"]), {}),
    ],
)
def test_only_required_lines_are_proposed_each_with_its_reason(lines: list[str], expected: dict[str, str]) -> None:
    assert envfile.parse("\n".join(lines), "proposal") == expected
    assert lines
    assert len([line for line in lines if line.startswith("#")]) == max(1, len(expected))
    assert all(len(line) <= 120 for line in lines)


def test_the_proposed_lines_have_no_problem() -> None:
    ports = {"mlx5_0:1": port(), "mlx5_bond_0:1": port(link="Ethernet")}
    parsed = envfile.parse("\n".join(env_lines(ports, "fd00::1", ["10.0.0.1"])), "proposal")
    assert len(parsed) == 2
    assert problems(parsed) == []
