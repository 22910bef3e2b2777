"""Keys: which value wins, what each type takes, and what is saved."""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

import launch
from recipes.conf import imagenet, mnist
from recipes.core.config import declare, help, job_keys, parser, profiles, recipe_conf
from recipes.core.config.job_keys import JobKeys
from recipes.core.config.run_keys import Device, RunKeys, TrainKeys
from recipes.core.errors import ConfigError
from recipes.core.run import command_line, directory, entry

RECIPES = recipe_conf.names()


def parse(*words: str, recipe: str = "", **environ: str) -> parser.Settings:
    return command_line.parse(
        words if recipe else ["recipe=mnist", *words], recipe=recipe, environ=environ
    )


def refusal(*words: str, recipe: str = "", **environ: str) -> str:
    """The message of the ConfigError that these words give; it has to be one line that can be
    printed.
    """
    with pytest.raises(ConfigError) as caught:
        parse(*words, recipe=recipe, **environ)
    message = str(caught.value)
    assert message.isprintable()
    assert 0 < len(message) < 600
    return message


def test_the_precedence_of_a_run_key(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mnist, "VARIANTS", {"v": {"network": "efa"}})
    site.write_text("network: roce\n")
    (tmp_path / "keys.yaml").write_text("network: ethernet\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    words: list[str] = []
    assert parse(*words).run.network == ""
    assert parse("variant=v").saved["network"] == "efa"
    for word, expected in (
        ("cluster=here", "roce"),
        ("variant=v", "efa"),
        ("config=~/keys.yaml", "ethernet"),
        ("network=slingshot", "slingshot"),
    ):
        words.insert(0, word)  # where a word stands does not matter
        assert parse(*words).run.network == expected, words


def test_the_precedence_of_a_recipe_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "DATASETS", {"digits": {"epochs": 11}})
    monkeypatch.setattr(mnist, "VARIANTS", {"v": {"epochs": 12}, "d": {"dataset": "digits"}})
    file = f"config={tmp_path}/keys.yaml"
    (tmp_path / "keys.yaml").write_text("epochs: 13\n")
    for epochs, *words in (
        (4,),
        (11, "dataset=digits"),
        (11, "variant=d"),
        (12, "variant=v", "dataset=digits"),
        (13, "variant=v", file),
        (14, "epochs=14", "variant=v", file),
        (2, "epochs=1", "epochs=2"),
    ):
        assert parse(*words).config.epochs == epochs, words


def test_the_precedence_of_a_job_key(site: Path) -> None:
    site.write_text(
        "gpus_per_node: 4\ntime: 2:00:00\npartition: gpu\nqos:\nmodules:\n  - gcc/12 # newest\n"
    )
    job = parse("cluster=here").job
    assert job.gpus_per_node == 4
    assert job.time == "2:00:00"
    assert job.partition == "gpu"
    assert job.qos == ""
    assert parse("cluster=here", "gpus_per_node=2").job.gpus_per_node == 2
    assert parse(RECIPES_CLUSTER="here").job.gpus_per_node == 4
    assert parse().job.gpus_per_node is None


def test_every_key_of_a_profile_is_used(site: Path) -> None:
    profile = {
        "partition": "p",
        "account": "a",
        "qos": "q",
        "constraint": "c",
        "reservation": "r",
        "extra": "--mem=0",
        "container": "docker://x",
        "container_runtime": "pyxis",
        "container_mounts": "/m",
        "gpus_per_node": "4",
        "gpu_type": "a100",
        "cpus_per_rank": "6",
        "time": "2:00:00",
        "network": "roce",
    }
    site.write_text("".join(f"{name}: {value}\n" for name, value in profile.items()))
    parsed = parse("cluster=here")
    keys = {**vars(parsed.job), **vars(parsed.run)}
    assert {name: str(getattr(keys[name], "name", keys[name])) for name in profile} == profile
    unset = dict.fromkeys(("RECIPES_CONTAINER", "RECIPES_CONTAINER_RUNTIME"), "")
    job = parse("cluster=here", **unset).job
    assert (job.container, job.container_runtime.name) == ("", "auto")


def test_data_dir_of_a_profile_is_the_default_of_the_recipe(site: Path, tmp_path: Path) -> None:
    site.write_text("data_dir: /site/data\n")
    assert parse("cluster=here").config.data_dir == "/site/data"
    assert parse("cluster=here", "data_dir=/mine").config.data_dir == "/mine"
    # which stands for that variable
    assert parse("cluster=here", RECIPES_DATA="/mine").config.data_dir == ""
    for data_dir, expected in (("''", "/site/data"), ("/old", "/old")):
        run = a_run(tmp_path / expected[1:], 5, data_dir=data_dir)
        assert parse("cluster=here", f"run_dir={run}").config.data_dir == expected
    # has no such key
    assert command_line.parse(["recipe=toy", "cluster=here"], environ={}).recipe == "toy"


def test_values_of_a_yaml_file_are_read_as_text(tmp_path: Path, site: Path) -> None:
    """YAML 1.1 takes 12:00:00 for a number to the base of 60, and 010 for eight."""
    (tmp_path / "keys.yaml").write_text("time: 12:00:00\nepochs: 010\ncompile: yes\n")
    settings = parse(f"config={tmp_path}/keys.yaml")
    assert job_keys.minutes(settings.job.time) == 720
    assert job_keys.minutes(parse("time=1:20").job.time) == 2  # rounded up
    assert settings.typed == {"epochs": "010", "compile": "yes"}  # no job keys
    assert settings.config.epochs == 10
    assert settings.config.compile is True
    site.write_text("time: 1:30:00\n")
    assert job_keys.minutes(parse("cluster=here").job.time) == 90


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("nodes=65536", 65536),
        ("lr=1", 1.0),
        ("compile=no", False),
        ("device=cpu", Device.cpu),
        ("gpus_per_node=null", None),
        ("data_dir=a=b", os.path.realpath("a=b")),
        ("data_dir=null", os.path.realpath("null")),
        ("data_dir=010", os.path.realpath("010")),
        ("data_dir=[1,2]", os.path.realpath("[1,2]")),
        ("run_dir=", ""),
    ],
)
def test_each_value_is_converted_to_the_type_of_its_key(word: str, expected: object) -> None:
    settings = parse(word)
    name = word.partition("=")[0]
    holder = next(h for h in (settings.job, settings.run, settings.config) if hasattr(h, name))
    value = getattr(holder, name)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("nodes=1.5", "a whole number"),
        ("parallel=null", "a whole number"),
        ("lr=fast", "a number"),
        ("compile=maybe", "true or false"),
        ("device=gpu", "one of auto, cuda, cpu; did you mean 'cpu'?"),
        ("dataset=x", "one of mnist, digits, fake"),
        ("dataset=???", "must be text"),
        ("nodes=0", "must be at least 1"),
        ("nodes=99999999999999999999", "must be at most 65536"),
        ("max_steps=9223372036854775808", "must be at most 9.22337e+18"),
        ("lr=nan", "a finite number"),
        ("umask=177", "must be three octal digits"),
        ("umask=", "must be three octal digits"),
        ("time=0", "must be more than 0"),
    ],
)
def test_an_invalid_value_is_refused_with_key_value_and_rule(word: str, wanted: str) -> None:
    message = refusal(word)
    assert message.startswith(f"{word}: ")
    assert wanted in message


def test_keys_that_contradict_each_other_are_refused() -> None:
    for recipe, word, wanted in (
        ("imagenet", "val_resize=223", "must be at least val_px=224"),
        ("imagenet", "small_px=31", "must be from 32 to px=224, or 0"),
        ("imagenet", "small_px=225", "must be from 32 to px=224, or 0"),
        ("imagenet", "stage_dir=/x", "dataset=fake has no files to copy"),
    ):
        assert refusal(word, "dataset=fake", recipe=recipe) == f"{word}: {wanted}"
    start, fix = refusal("arch=airbench94", recipe="cifar").split("; ")
    reason = "is too large, since arch=airbench94 multiplies it by the batch size"
    assert start == f"weight_decay=0.0005: {reason}"
    assert fix == "give variant=fast, or weight_decay=2e-6"


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    assert "did you mean 'epochs'" in refusal("epoch=1")
    assert "did you mean 'mnist'" in refusal("recipe=minst")
    assert "did you mean" not in refusal("zzzzzz=1")
    assert refusal("mem=64G").endswith(
        "an option of sbatch goes into extra=, such as extra='--mem=64G'"
    )
    hint = "; sweep.lr= of launch.py starts a run for each value"
    assert refusal("lr=0.1,0.2") == f"lr=0.1,0.2: must be a number{hint}"
    assert "recipes/conf/NAME.py" in refusal("recipe=prepare")


def test_the_value_of_one_swept_key_is_named_once() -> None:
    assert not parse("sweep.lr=0.1").sweep  # submitit makes no array of one job
    unknown = "epoch=1: recipe mnist has no key 'epoch'; did you mean 'epochs'?"
    assert refusal("sweep.epoch=1") == f"sweep.epoch=1: {unknown}"
    message = refusal("sweep.lr=x", "sweep.seed=1")
    assert message.startswith("sweep.lr=x sweep.seed=1: lr=x: must be a number")


def test_a_job_key_for_a_recipe_is_refused_with_the_option_of_sbatch() -> None:
    options = {f.name: f.metadata["instead"] for f in dataclasses.fields(JobKeys)}
    assert sum(bool(o) for o in options.values()) > 10
    for name, option in options.items():
        message = refusal(f"{name}=1", recipe="mnist")
        assert message.startswith(f"{name}=1: ")
        assert (option or "launch.py") in message
        has_its_value = option.startswith("--") and not {" ", "="} & set(option)
        assert (f"{option}=1," in message) == has_its_value
    assert "give sbatch or srun --nodes=4," in refusal("nodes=4", recipe="mnist")


def test_interpolations_of_omegaconf_are_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T_PLACE", "hunter2")
    for text in ("/d/${oc.env:T_PLACE}", "/d/${epochs}", "/d\\${a}", "/d/\\\\${", "${"):
        settings = parse(f"data_dir={text}")
        assert settings.config.data_dir == settings.typed["data_dir"] == text
    assert "must be a whole number" in refusal("epochs=${oc.env:T_EPOCHS}")


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    typed = {
        "run_dir": "runs/a",
        "data_dir": "~/d",
        "config": "/x/../y.yaml",
        "resume": "a/b.pt",
        "network": "my.env",
        "epochs": "3",
        "dataset": "digits",
    }
    assert parser.absolute(typed, mnist.Config) == {
        "run_dir": f"{tmp_path}/runs/a",
        "data_dir": "/home/me/d",
        "config": "/y.yaml",
        "resume": f"{tmp_path}/a/b.pt",
        "network": f"{tmp_path}/my.env",
        "epochs": "3",
        "dataset": "digits",
    }
    for word in ("auto", "never", "best", "latest"):
        same = {"run_dir": "", "data_dir": "$SCRATCH/d", "resume": word, "network": "efa"}
        assert parser.absolute(same, mnist.Config) == same
    settings = parse("data_dir=here")
    values = (settings.typed["data_dir"], settings.saved["data_dir"], settings.config.data_dir)
    assert set(values) == {f"{tmp_path}/here"}


def test_every_folder_or_file_key_is_declared_as_a_path() -> None:
    for cls in (RunKeys, *(recipe_conf.load(recipe)[0] for recipe in RECIPES)):
        for field in dataclasses.fields(cls):
            if field.name.endswith(("_dir", "_file", "_path")):
                assert field.metadata["path"], field.name


def test_the_sites_env_file_overrides_the_networks(tmp_path: Path, site: Path) -> None:
    (tmp_path / "mine.env").write_text("NCCL_A=mine\nNCCL_B=mine\n")
    (site.parent / "here.env").write_text("NCCL_B=site\n")
    site.write_text("env_files:\n  - clusters/here.env\n")
    variables = profiles.env_variables(str(tmp_path / "mine.env"), "here")
    assert variables["NCCL_A"] == "mine"
    assert variables["NCCL_B"] == "site"
    (site.parent / "here.env").write_text("PATH=/evil\n")
    assert "here.env:1" in refusal("cluster=here")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("partiton: gpu\n", ["here.yaml", "partiton", "did you mean 'partition'"]),
        ("modules:\n  - gcc/12\n  - gcc; touch x\n", ["here.yaml", "modules", "list"]),
        ('modules:\n  - gcc/12\n  - "cuda/12"\n', ["here.yaml", "write - cuda/12"]),
        ("env_files:\n  - clusters/no.env\n", ["no.env"]),
        ("- a\n- b\n", ["here.yaml", "is not a mapping"]),
        ("partition: a\npartition: b\n", ["here.yaml", "'partition' is set twice"]),
        ("gpus_per_node: four\n", ["gpus_per_node=four", "a whole number"]),
        ("partition: [a, b]\n", ["here.yaml", "'partition' must be one plain value"]),
        (
            'environment: "/opt/e"\n',
            ["here.yaml", "write environment: /opt/e on its own line, without quotes"],
        ),
        (
            "gpus: --gres=gpu\n",
            ["here.yaml", "'gpus: --gres=gpu' must be --gres, --gpus-per-node or"],
        ),
        ("data_dir: data\n", ["here.yaml", "'data_dir: data' must be an absolute path"]),
        ("environment: a;b\n", ["here.yaml", "'environment: a;b' must be the absolute path"]),
    ],
)
def test_an_invalid_profile_is_refused_with_its_file_and_key(
    site: Path, text: str, words: list[str]
) -> None:
    site.write_text(text)
    message = refusal("cluster=here")
    assert all(word in message for word in words), message


def test_empty_values_of_a_profile_are_ignored(site: Path) -> None:
    site.write_text("partition:\naccount: null\nmodules:\n#  - gcc\ngpus_per_node: 2 # a comment\n")
    job = parse("cluster=here").job
    assert job.partition == ""
    assert job.account == ""
    assert job.gpus_per_node == 2
    site.write_text("# nothing yet\n")
    assert parse("cluster=here").job.gpus_per_node is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_has_one_place_a_help_text_and_a_valid_default(recipe: str) -> None:
    job, run = ({f.name for f in dataclasses.fields(cls)} for cls in (JobKeys, RunKeys))
    cls, variants = recipe_conf.load(recipe)
    of_recipe = {f.name for f in dataclasses.fields(cls)}
    assert len(job) > 15
    assert len(run) > 8
    assert of_recipe
    assert not job & run
    assert not (job | run) & of_recipe
    for keys in (JobKeys, RunKeys, cls):
        assert all(f.metadata.get("help") for f in dataclasses.fields(keys))
        keys()
    for name in variants:
        assert parse(f"variant={name}", recipe=recipe).run.variant == name


@pytest.mark.parametrize(
    ("attribute", "kind"),
    [
        ("VARIANTS", "variant"),
        ("DATASETS", "dataset"),
    ],
)
def test_an_invalid_variant_or_data_set_is_refused(
    monkeypatch: pytest.MonkeyPatch, attribute: str, kind: str
) -> None:
    monkeypatch.setattr(mnist, attribute, {"digits": {"epoch": 3}})
    message = refusal()  # even if it is not selected
    assert message.startswith(f"recipes/conf/mnist.py: {kind}=digits: sets 'epoch', ")
    assert message.endswith("; did you mean 'epochs'?")
    monkeypatch.setattr(mnist, attribute, {"digits": {"warmup": 9.5}})
    assert refusal(f"{kind}=digits") == "warmup=9.5: must be at most 1"


def test_an_unknown_recipe_is_refused_where_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.begin("minst", [])
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith('minst: entry.begin("minst") in ')
    assert "; did you mean 'mnist'?" in line


@pytest.mark.parametrize("recipe", ["", *RECIPES])
def test_help_has_every_key_with_its_default(recipe: str) -> None:
    text = help.help_text(recipe)
    assert max(map(len, text.splitlines())) <= help.COLUMNS
    plain = " ".join(text.split())
    for cls in (RunKeys, recipe_conf.load(recipe)[0] if recipe else JobKeys):
        for field in dataclasses.fields(cls):
            assert f" {field.name}={help.typed(field.default)}".rstrip() in plain
            assert " ".join(field.metadata["help"].split()) in plain


def test_help_of_launch_shows_the_recipes_keys_and_the_keys_of_variants(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launch.main(["recipe=mnist", "--help"]) == 0
    said = capsys.readouterr().out
    assert "\nvariant=sgd sets optimizer=sgd lr=0.1 weight_decay=0.0005\n" in said
    assert "\ndataset=digits sets global_batch_size=64 lr=0.003\n" in said
    assert "  nodes= " in said
    assert "  warmup=" in said


def test_keys_that_may_change_on_a_resume_are_declared_so() -> None:
    of_all = {
        "epochs",
        "max_steps",
        "num_workers",
        "accumulate",
        "compile",
        "deterministic",
        "evaluate",
        "log_every_steps",
        "data_dir",
        "clip_grad_norm",
        "best_metric",
        "best_mode",
        "patience",
        "profile",
        "tensorboard",
        "strategy",
        "shard_size",
    }
    # a recipe's own default changes nothing
    assert declare.may_change(mnist.Config) == of_all
    of_imagenet = {"val_batch_size", "stage_dir", "weights"}
    assert declare.may_change(imagenet.Config) == of_all | of_imagenet
    assert declare.declared("not_inherited", RunKeys, TrainKeys) == {
        "run_dir",
        "variant",
        "config",
        "environment",
        "resume",
        "force",
        "debug",
        "evaluate",
        "profile",
    }


def a_run(
    folder: Path, *steps: int, state: str = "preempted", recipe: str = "mnist", **keys: object
) -> Path:
    """What a run leaves: its keys, its status at its last step, and empty checkpoints."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "".join(f"{name}: {value}\n" for name, value in keys.items())
    )
    (folder / "attempt.json").write_text(
        json.dumps({"attempt": 0, "launch": "", "from_step": 0, "recipe": recipe})
    )
    directory.write_status(folder, state, attempt=0, step=max(steps, default=0))
    for step in steps:
        (folder / f"checkpoints/step-{step:08d}.pt").touch()
    return folder


def test_inherited_keys_override_the_datasets_and_typed_keys_override_both(tmp_path: Path) -> None:
    run = a_run(
        tmp_path / "r",
        5,
        dataset="digits",
        lr=0.02,
        epochs=40,
        device="cpu",
        timeout_s=60,
        log_every_steps=2,
        global_batch_size=64,
    )
    (tmp_path / "keys.yaml").write_text("log_every_steps: 3\n")
    words = [f"run_dir={run}", f"config={tmp_path}/keys.yaml", "timeout_s=70", "force=true"]
    for settings in (parse(*words), parse(*words, recipe="mnist")):
        config = settings.config
        assert config.dataset == "digits"
        assert config.lr == 0.02
        assert config.epochs == 40
        assert config.log_every_steps == 3
        assert config.global_batch_size == 64  # digits' own
        assert settings.run.device.name == "cpu"
        assert settings.run.timeout_s == 70
        assert settings.resumes == run
        assert settings.words_from_run() == "dataset=digits, lr=0.02, epochs=40, device=cpu"
        assert not {"dataset", "lr", "epochs", "device"} & settings.typed.keys()
        saved = settings.saved
        assert saved["epochs"] == 40
        assert saved["device"] == "cpu"
        assert saved["timeout_s"] == 70
        assert not {"run_dir", "config", "resume", "force", "backend"} & saved.keys()


@pytest.mark.parametrize("words", [["resume=never"], ["run_dir=other"], []])
def test_a_new_run_inherits_no_keys(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a_run(tmp_path / "run", 5, epochs=40)
    settings = parse(*(["run_dir=run", *words] if words == ["resume=never"] else words))
    assert settings.config.epochs == 4
    assert settings.from_run == {}
    assert settings.resumes is None


@pytest.mark.parametrize(
    "place", ["", "/checkpoints", "/checkpoints/step-00000005.pt", "/checkpoints/best"]
)
def test_a_checkpoint_of_another_run_gives_its_keys(tmp_path: Path, place: str) -> None:
    run = a_run(tmp_path / "run", 5, epochs=40)
    (run / "checkpoints/best").write_text("step-00000005.pt\n")
    assert parse(f"resume={run}{place}", f"run_dir={tmp_path}/new").config.epochs == 40
    with pytest.raises(
        ConfigError, match=r"^resume=.* is a run of recipe mnist, not cifar: give another resume=$"
    ):
        parse("recipe=cifar", f"resume={run}{place}")


SHORTER = "would become shorter"
SCHEDULE = "learning-rate schedule"
CONSTANT = {"schedule": "constant", "warmup": 0}


@pytest.mark.parametrize(
    ("keys", "state", "words", "refused"),
    [
        ({"epochs": 40}, "preempted", ["epochs=40", "lr=0.004", "log_every_steps=3"], ""),
        (
            {"epochs": 40},
            "preempted",
            ["epochs=50"],
            f"epochs=50: the run has epochs=40, and the {SCHEDULE}",
        ),
        ({"epochs": 40}, "preempted", ["epochs=50", "force=true"], ""),
        ({"epochs": 40}, "done", ["epochs=50", "resume=latest"], ""),
        (
            {"epochs": 40},
            "done",
            ["epochs=50", "resume=RUN/checkpoints/step-00000003.pt"],
            SCHEDULE,
        ),
        ({"epochs": 40}, "done", ["epochs=50", "resume=RUN/checkpoints/step-00000005.pt"], ""),
        ({"epochs": 40}, "done", ["epochs=50", "resume=best"], SCHEDULE),  # step 3
        (
            {"epochs": 40},
            "preempted",
            ["max_steps=9"],
            f"max_steps=9: the run has max_steps=0, and {SHORTER}",
        ),
        ({"max_steps": 9}, "done", ["max_steps=0"], ""),
        (CONSTANT, "preempted", ["epochs=50"], ""),
        (CONSTANT, "preempted", ["epochs=3"], SHORTER),
        ({**CONSTANT, "warmup": 0.1}, "preempted", ["epochs=50"], SCHEDULE),
        ({"lr": 0.01}, "preempted", ["variant=sgd", "force=true"], "lr=0.01 becomes 0.1"),
        ({"lr": 0.01}, "preempted", ["lr=0.1", "evaluate=true"], ""),
    ],
)
def test_keys_that_would_change_the_result_are_refused_on_a_resume(
    tmp_path: Path, keys: dict[str, object], state: str, words: list[str], refused: str
) -> None:
    run = a_run(tmp_path / "run", 3, 5, state=state, **keys)
    (run / "checkpoints/best").write_text("step-00000003.pt\n")
    words = [f"run_dir={run}", *(word.replace("RUN", str(run)) for word in words)]
    if refused:
        with pytest.raises(ConfigError, match=re.escape(refused)):
            parse(*words)
    else:
        parse(*words)


def test_a_resumed_run_may_execute_the_code_of_its_model_if_that_is_allowed_again(
    tmp_path: Path,
) -> None:
    run = a_run(tmp_path / "run", 5, recipe="llm", allow_code="0123")
    resumed = parse("recipe=llm", f"run_dir={run}", "allow_code=0123")
    assert resumed.config.allow_code == "0123"
    assert parse("recipe=llm", f"run_dir={run}").config.allow_code == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr: [", r"^/.*/run/config.yaml: is not YAML"),
        ("- lr\n", r"/run/config.yaml: is not a mapping; write 'key: value' lines$"),
        ("lr: x\n", "^lr=x: must be a number$"),
        ("colour: red\n", "^/.*/run/config.yaml: has colour=, which recipe mnist does not have"),
    ],
)
def test_a_damaged_config_yaml_is_refused_in_one_line(
    tmp_path: Path, text: str, words: str
) -> None:
    run = a_run(tmp_path / "run", 5)
    (run / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        parse(f"run_dir={run}")


def test_a_config_yaml_outside_a_run_directory_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("colour: red\n")
    (tmp_path / "model.pt").touch()
    parsed = parse(f"resume={tmp_path}/model.pt")
    assert parsed.resumes is None
    assert parsed.from_run == {}


def test_ranges_are_checked_also_if_a_recipe_forgets_the_base_class() -> None:
    @dataclasses.dataclass(frozen=True)
    class Config(TrainKeys):
        def __post_init__(self) -> None:
            pass

    with pytest.raises(ConfigError, match=r"^epochs=-1: must be at least 0$"):
        declare.build(Config, {"epochs": "-1"})


def test_a_recipe_declares_only_what_differs() -> None:
    @dataclasses.dataclass(frozen=True)
    class Config(TrainKeys):
        lr: float = 0.5
        offset: float = declare.key(0.0, "any number", low=None)

    built = declare.build(Config, {"offset": "-2.5"})
    assert (built.lr, built.offset) == (0.5, -2.5)
    assert declare.may_change(Config) == declare.may_change(TrainKeys)
    with pytest.raises(ConfigError, match=r"^lr=-1\.0: must be at least 0$"):
        declare.build(Config, {"lr": "-1"})
