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
    variables = {name: f"RECIPES_{name.upper()}" for name in job_keys.IN_IMAGE}
    given = {name: environ[variable] for name, variable in variables.items() if variable in environ}
    return {
        name: value or ("auto" if name == "container_runtime" else "")
        for name, value in given.items()
    }


def cluster_profile(cluster: str) -> dict[str, Any]:
    """The profile env/clusters/NAME.yaml, without empty values: the keys of `DEFAULTS`, `TEXTS` and
    `LISTS`.

    The job keys and run keys check the values of `DEFAULTS`. Raises ConfigError if there is no such
    profile, or if it has an unknown key or an invalid value.
    """
    folder = ROOT / "env" / "clusters"
    there = sorted(p.stem for p in folder.glob("*.yaml"))
    if cluster not in there:
        raise ConfigError(
            f"cluster={shown(cluster)}: {declare.choice(cluster, there)} (files of env/clusters)"
        )
    path = folder / f"{cluster}.yaml"
    if problem := trust.problem_outside(path):
        raise ConfigError(f"{path}: {problem}; or use a copy in env/ of your own clone")
    profile = {
        k: v for k, v in key_value.load_yaml(path, str(path)).items() if v not in ("", "null", "~")
    }
    for name, value in profile.items():
        if problem := _problem(str(name), value):
            raise ConfigError(f"{path}: {problem}")
    # sbatch/job.sh reads these lines with sed, before it has a Python environment.
    for_sed = [f"- {module}" for module in profile.get("modules", ())]
    for_sed += [f"environment: {profile['environment']}"] if "environment" in profile else []
    lines = {
        " ".join(line.split("#")[0].split())
        for line in path.read_text(encoding="utf-8").splitlines()
    }
    if missing := [line for line in for_sed if line not in lines]:
        raise ConfigError(
            f"{path}: write {missing[0]} on its own line, without quotes or brackets: batch scripts need this form"
        )
    return profile


def _problem(name: str, value: Any) -> str:
    """Why a key of a profile is invalid; "" if it is valid."""
    if name in LISTS:
        valid = isinstance(value, list) and all(re.fullmatch(NAME, str(one)) for one in value)
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
    profile = cluster_profile(cluster) if cluster else {}
    paths = envfile.files_for(network, ROOT / "env", profile.get("env_files", ()))
    variables: dict[str, str] = {}
    for file in paths:
        settings = envfile.read(file)
        if not file.is_relative_to(ROOT / "env"):
            envfile.require_harmless(settings, str(file))
        variables |= settings
    return variables
