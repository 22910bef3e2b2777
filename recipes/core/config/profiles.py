"""Profiles of sites (env/clusters/NAME.yaml): defaults of job keys, how GPUs are requested, env
files, modules.
"""

import re
from collections.abc import Mapping
from typing import Any

from recipes.core import trust
from recipes.core.config import declare, envfile, job_keys, key_value
from recipes.core.errors import ConfigError, shown
from recipes.core.files import ROOT

LISTS = ("modules", "env_files")  # keys of a profile that are lists of names
NAME = r"[A-Za-z0-9_.+/-]{1,256}"  # of a module or an env file
# Keys of a profile that are texts, each with a regular expression and the rule in words.
TEXTS = {
    "gpus": (
        "--gres|--gpus-per-node|--gpus-per-task",
        "must be --gres, --gpus-per-node or --gpus-per-task",
    ),
    "environment": (
        r"/[A-Za-z0-9_.+/@=-]{1,256}",
        "must be the absolute path of a venv or a conda environment",
    ),
    "data_dir": (r"(/|~/).*", "must be an absolute path"),
}
# Defaults of job keys and run keys, which check the values.
DEFAULTS = (
    "partition",
    "account",
    "qos",
    "constraint",
    "reservation",
    "extra",
    *job_keys.IN_IMAGE,
    "gpus_per_node",
    "gpu_type",
    "gpu_memory_gb",
    "cpus_per_rank",
    "time",
    "network",
)


def in_image(environ: Mapping[str, str]) -> dict[str, str]:
    """The container keys that ``$RECIPES_CONTAINER``, ``…_RUNTIME`` and ``…_MOUNTS`` set. An empty
    variable overrides the profile too.
    """
    keys = {}
    for name in job_keys.IN_IMAGE:
        value = environ.get(f"RECIPES_{name.upper()}")
        if value is not None:
            keys[name] = value or ("auto" if name == "container_runtime" else "")
    return keys


def cluster_profile(cluster: str) -> dict[str, Any]:
    """The profile env/clusters/NAME.yaml, without empty values: the keys of `DEFAULTS`, `TEXTS` and
    `LISTS`; {} if ``cluster`` is "".

    The job keys and run keys check the values of `DEFAULTS`. Raises ConfigError if there is no such
    profile, or if it has an unknown key or an invalid value.
    """
    if not cluster:
        return {}
    folder = ROOT / "env" / "clusters"
    there = sorted(path.stem for path in folder.glob("*.yaml"))
    if cluster not in there:
        rule = declare.choice(cluster, there)
        raise ConfigError(f"cluster={shown(cluster)}: {rule} (files of env/clusters)")
    path = folder / f"{cluster}.yaml"
    problem = trust.problem_outside(path)
    if problem:
        raise ConfigError(f"{path}: {problem}; or use a copy in env/ of your own clone")
    keys = key_value.load_yaml(path, str(path))
    profile = {name: value for name, value in keys.items() if value not in ("", "null", "~")}
    for name, value in profile.items():
        problem = _problem(str(name), value)
        if problem:
            raise ConfigError(f"{path}: {problem}")
    # sbatch/job.sh reads these lines with sed, before it has a Python environment.
    for_sed = [f"- {module}" for module in profile.get("modules", ())]
    if "environment" in profile:
        for_sed.append(f"environment: {profile['environment']}")
    text = path.read_text(encoding="utf-8")
    lines = [" ".join(line.split("#")[0].split()) for line in text.splitlines()]
    for line in for_sed:
        if line not in lines:
            rule = "on its own line, without quotes or brackets: batch scripts need this form"
            raise ConfigError(f"{path}: write {line} {rule}")
    return profile


def _problem(name: str, value: Any) -> str:
    """Why a key of a profile is invalid; "" if it is valid."""
    if name in LISTS:
        valid = isinstance(value, list) and all(re.fullmatch(NAME, str(item)) for item in value)
        return "" if valid else f"'{name}' must be a list of names, each on its own line after '- '"
    if name not in DEFAULTS and name not in TEXTS:
        return f"unknown key '{shown(name)}'{declare.nearest(name, (*DEFAULTS, *TEXTS, *LISTS))}"
    if not isinstance(value, str):
        return f"'{name}' must be one plain value"
    if name in TEXTS and not re.fullmatch(TEXTS[name][0], value, re.ASCII):
        return f"'{name}: {shown(value)}' {TEXTS[name][1]}"
    return ""


def env_variables(network: str, cluster: str) -> dict[str, str]:
    """The variables of the env files: common < the fabric's < the site's. Raises ConfigError."""
    profile = cluster_profile(cluster)
    paths = envfile.files_for(network, ROOT / "env", profile.get("env_files", ()))
    variables = dict[str, str]()
    for file in paths:
        settings = envfile.read(file)
        if not file.is_relative_to(ROOT / "env"):
            envfile.require_harmless(settings, str(file))
        variables |= settings
    return variables
