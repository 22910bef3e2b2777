"""The files of a model lead to no other file, and its code runs only if nobody can exchange it."""

from __future__ import annotations

import os
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from recipes.core import errors, files, trust
from recipes.core.data import hub
from recipes.core.errors import InputError, MachineError
from tests.helpers import ROOT
from tests.unit.other_users.common import STRANGER, as_root


def copied(model: Path) -> set[str]:
    with hub.opened(str(model)) as copy:
        return {path.name for path in copy.rglob("*.*")}


@as_root
def test_a_model_has_no_link_of_another_user_and_no_pipe(tmp_path: Path) -> None:
    """The run keeps copies of some of its files."""
    (tmp_path / "secret").write_text("mine")
    model = tmp_path / "model"
    (model / "additional_chat_templates").mkdir(parents=True)
    for name in ("x.jinja", "additional_chat_templates/x.jinja", "x.safetensors"):
        link = model / name
        link.symlink_to(tmp_path / "secret")
        if link.suffix == ".safetensors":
            assert link.name in copied(model)  # an own link
        os.lchown(link, STRANGER, STRANGER)
        with pytest.raises(MachineError, match=rf"{link}: is a link of another user"):
            copied(model)
        link.unlink()
    os.mkfifo(link)
    for name in ("x.safetensors", "x.jinja"):
        link = link.rename(model / name)
        with pytest.raises(InputError, match=rf"{link}: cannot be copied to .* ordinary file"):
            copied(model)


def test_a_copied_model_publishes_no_private_file(tmp_path: Path) -> None:
    """In a copy, links of its former owner are links of this user."""
    secret = tmp_path / "secret"
    secret.write_text("mine")
    model = tmp_path / "models--a--b/snapshots/0"
    model.mkdir(parents=True)
    blob = tmp_path / "models--a--b/blobs/1"
    blob.parent.mkdir()
    blob.write_text("theirs")
    template = model / "chat_template.jinja"
    template.symlink_to("../../blobs/1")
    assert copied(model) == {template.name}
    blob.unlink()
    blob.symlink_to(secret)
    with pytest.raises(InputError, match=rf"is a link to {secret}, outside") as refused:
        copied(model)
    fix = str(refused.value).rpartition("run ")[2]
    subprocess.run(fix, shell=True, check=True)
    assert copied(model) == {template.name}


def test_a_model_cannot_be_exchanged_after_it_was_checked(tmp_path: Path) -> None:
    """By a link of its owner to a private file of this user."""
    (tmp_path / "secret").write_text("mine")
    model = tmp_path / "model"
    model.mkdir()
    names = ("chat_template.jinja", "model.safetensors")
    for name in names:
        (model / name).write_text("theirs")
    with hub.opened(str(model)) as copy:
        for name in names:
            (model / name).unlink()
            (model / name).symlink_to(tmp_path / "secret")
            assert (copy / name).read_text() == "theirs"
    assert not copy.exists()


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config.json", {"transformers_weights": "../x.safetensors"}, "its transformers_w"),
        (
            "model.safetensors.index.json",
            {"weight_map": {"head": "/home/me/x.safetensors"}},
            "its head may",
        ),
        (
            "config.json",
            {"text_config": {"attn_implementation": {"": "them/kernel"}}},
            "may lead to a file or to code outside its folder: give a copy of the model without it",
        ),
        ("config.json", {"parts": [{"x\x1b": ["../secret"]}]}, r"its x\\x1b may"),
        (
            "config.json",
            {"vision_config": {"model_args": {"checkpoint_path": "x.pth"}}},
            "its model_args may",
        ),
        ("config.json", {"configuration_files": ["config.5.0.json"]}, "its configuration_f"),
        ("config.json", {"text_config": {"auto_map": {"AutoModel": "x.M"}}}, "its auto_map may"),
        ("config.json", {"tokenizer_class": "CLIPProcessorFast"}, "its tokenizer_class may"),
        ("tokenizer_config.json", {"tokenizer_class": "AutoModel"}, "its tokenizer_class may"),
        ("config.json", {"attribute_map": {"transformers_weights": "prefix"}}, "its attribute_map"),
        ("config.json", {"vision_config": {"architecture": "local-dir:.."}}, "its architecture"),
        ("config.json", {"tokenizer_class": "Fast" * 100_000 + "x"}, "its tokenizer_class may"),
        ("adapter_config.json", {"base_model_name_or_path": "x"}, "is an adapter: merge it"),
    ],
)
def test_a_model_names_no_weights_and_no_code_elsewhere(
    tmp_path: Path, file: str, content: dict[str, object], problem: str
) -> None:
    """transformers would train private weights of this user, or execute a kernel of the hub, and
    timm would open a pickle.
    """
    pytest.importorskip("transformers")
    files.write_json(tmp_path / file, content)
    with pytest.raises(InputError, match=problem):
        copied(tmp_path)


def test_transformers_does_not_ask_whether_code_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it did for a model in a model, where trust_remote_code=False is not passed on."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda _: "y")
    with pytest.raises(ValueError, match="requires you to execute custom code"):
        hub.transformers().dynamic_module_utils.resolve_trust_remote_code(None, "x", False, True)


def test_packages_that_would_execute_code_of_files_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("jinja2")
    assert errors.require("jinja2", "llm")
    monkeypatch.setattr(metadata, "version", {"jinja2": "3.1.5"}.get)
    with pytest.raises(InputError, match=r"jinja2 3\.1\.5 is older .*: pip install '\.\[llm\]'$"):
        hub.transformers()
    bounds = re.findall(r'"([\w-]+)>=([\w.]+)"', (ROOT / "pyproject.toml").read_text())
    assert errors.OLDEST.items() <= set(bounds)


@as_root
def test_code_of_a_model_that_another_user_can_exchange_has_no_digest(tmp_path: Path) -> None:
    """They could show other code to who reads it."""
    code = tmp_path / "model/mine.py"
    model = str(code.parent)
    code.parent.mkdir()
    code.write_text("")
    names = {"AutoConfig": "mine.Config"}
    files.write_json(tmp_path / "model/config.json", {"model_type": "mine", "auto_map": names})
    with hub.opened(model) as copy:
        for place in (code, code.parent):
            os.chown(place, STRANGER, STRANGER)
            fix = "copy the folder, or its run, with cp -r, read the copy, and give it instead"
            with pytest.raises(InputError, match=f"{place} belongs to another user: {fix}$"):
                hub.allows_code(model, copy, "")
            os.chown(place, 0, 0)
        assert not (copy / "mine.py").exists()
        with pytest.raises(InputError, match=rf"mine\.py in {model}\): read it, then give allow_c"):
            hub.allows_code(model, copy, "")
        code.unlink()
        code.symlink_to("missing")
        with pytest.raises(InputError, match=r"missing cannot be read .*: fetch it again"):
            hub.allows_code(model, copy, "")


@as_root
def test_a_link_is_not_taken_for_what_it_leads_to(tmp_path: Path) -> None:
    """Its maker may have put it there after the path was resolved."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    os.lchown(link, STRANGER, STRANGER)
    assert trust.who_else_can_change(link) == f"{link} belongs to another user"


def test_settings_of_a_tokenizer_are_not_passed_to_other_libraries(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    settings = {"sudachi_kwargs": {"sudachi_config_path": "x"}, "target_spm": "x", "eos": "</s>"}
    files.write_json(tmp_path / "tokenizer_config.json", settings)
    with hub.opened(str(tmp_path)) as copy:
        assert files.read_json(copy / "tokenizer_config.json") == {"eos": "</s>"}


def test_settings_of_a_processor_are_not_read(tmp_path: Path) -> None:
    """They may name a model anywhere."""
    pytest.importorskip("transformers")
    for name in ("processor_config.json", "audio_tokenizer_config.json", "tokenizer_config.json"):
        files.write_json(tmp_path / name, {"tokenizer_class": "LlamaTokenizerFast"})
    assert copied(tmp_path) == {"tokenizer_config.json"}


def test_a_model_may_have_the_names_of_what_it_was_made_from(tmp_path: Path) -> None:
    """As in the configs of OPT, MPT, Gemma 3n and Falcon."""
    content = {
        "prefix": "</s>",
        "tokenizer_name": "them/x",
        "vision_config": {"_name_or_path": "/data/x", "model_args": None},
        "auto_map": {"AutoConfig": "them/x--configuration_x.X"},
    }
    files.write_json(tmp_path / "config.json", content)
    assert "config.json" in copied(tmp_path)
