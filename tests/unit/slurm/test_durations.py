from __future__ import annotations

import math

import pytest

from recipes.core.slurm import durations


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("0090", 5400),
        ("1:01", 61),
        ("90:00", 5400),
        ("01:00:00", 3600),
        ("100:00:30", 360_030),
        ("0", 0),
        ("1-0", 86_400),
        ("2-12", 216_000),
        ("1-02:30", 95_400),
        ("1-02:30:01", 95_401),
        ("UNLIMITED", math.inf),
        *(
            (text, None)
            for text in ("", "-1", "1:2:3:4", "1-", "1h", "1:0", "1-100", "٣", "NOT_SET", "1\n")
        ),
    ],
)
def test_a_time_limit_is_read_in_each_form_of_slurm(text: str, seconds: float | None) -> None:
    assert durations.seconds(text) == seconds
