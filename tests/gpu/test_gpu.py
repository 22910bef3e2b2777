"""Two checks of ``make gpu`` on a CPU, and one of ``make gpus``. The others start whole runs, which
other tests cover.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.gpu import __main__ as command
from tests.gpu.place import Place
from tests.gpu.table import OF_ONE


@pytest.mark.parametrize("name", ["arithmetic", "host_copy"])
def test_a_check_runs_on_a_cpu(tmp_path: Path, name: str) -> None:
    assert OF_ONE[name](Place(torch.device("cpu"), tmp_path))


def test_the_report_has_a_result_for_each_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each in its own process: one that fails does not stop the others."""
    results = {
        "ddp": {"result": "fail", "why": "status -9: "},
        "host_copy": {"result": "pass", "figures": {"pause": "1 ms"}},
    }
    monkeypatch.setattr(command, "one", lambda name, dry: results[name])
    assert command.main([str(tmp_path / "gpu.json"), "only=ddp,host_copy", "dry=true"]) == 1
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert [report["checks"][name]["result"] for name in results] == ["fail", "pass"]
    assert report["machine"]["torch"] == torch.__version__
    assert "pass         host_copy: a checkpoint holds" in capsys.readouterr().out
    assert command.main(["only=host_cop"]) == 2
    assert "did you mean 'host_copy'?" in capsys.readouterr().out


def test_a_check_that_crashes_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ROOT", Path("/"))
    result = command.one("host_copy", dry=True)
    assert result["result"] == "fail"
    assert result["why"].startswith("status 1: ")
