import sys
import time

import pytest

from recipes.core.data.progress import Meter, Progress


def test_progress_in_a_log_is_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    meter = Meter("imagenet")
    for now in range(100, 131, 2):
        meter.show(Progress(total=1100, done=10 * (now - 100), kept=100, skipped=3))
    meter.end()
    assert capsys.readouterr().err.splitlines() == [
        "imagenet: 100 of 1000 images, 10 images/s, 90 s left, 3 skipped, 100 kept",
        "imagenet: 200 of 1000 images, 10 images/s, 80 s left, 3 skipped, 100 kept",
        "imagenet: 300 of 1000 images, 10 images/s, 70 s left, 3 skipped, 100 kept",
    ]


def test_progress_on_a_terminal_is_one_line_with_rate_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    meter = Meter("imagenet")
    meter.show(Progress(total=1_281_167))
    now += 0.1
    meter.show(Progress(total=1_281_167, done=10))
    now += 99.9
    meter.show(Progress(total=1_281_167, done=30_000, skipped=2))
    meter.end()
    assert capsys.readouterr().err.split("\r\033[K") == [
        "",
        "imagenet: 0 of 1281167 images, starting, 0 skipped",
        "imagenet: 30000 of 1281167 images, 300 images/s, 70 min left, 2 skipped",
        "",
    ]
