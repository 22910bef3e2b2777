"""Profiles of sites (env/clusters/NAME.yaml): defaults of job keys, how GPUs are requested, env files, modules."""

import re
from collections.abc import Mapping
from typing import Any

from recipes.core.config import declare, envfile, job_keys, yaml_file
from recipes.core.errors import ConfigError, shown
from recipes.core.files import ROOT

# Keys that only a profile has: how jobs request GPUs and nodes. Each with a regular expression and the rule in words.
ASKS = {
    "gpus": ("--gres|--gpus-per-node|--gpus-per-task", "must be --gres, --gpus-per-node or --gpus-per-task"),
    "exclusive": ("true|false|user|mcs|topo", "must be true, false, or a value of sbatch's --exclusive"),
    "mem": (r"\d{1,12}[KMGT]?", "must be a value of sbatch's --mem, such as 0 or 64G"),
    "segment": (r"\d{1,6}", "must be a number of nodes"),
    "switches": (rf"\d{{1,6}}(@({job_keys.TIME}))?", "must be NUMBER or NUMBER@TIME"),
}


def in_image(environ: Mapping[str, str]) -> dict[str, str]:
    """The container keys that ``$RECIPES_CONTAINER``, ``…_RUNTIME`` and ``…_MOUNTS`` set. An empty variable overrides the profile too."""
    said = {
        name: environ[f"RECIPES_{name.upper()}"] for name in job_keys.IN_IMAGE if f"RECIPES_{name.upper()}" in environ
    }
    return {name: value or ("auto" if name == "container_runtime" else "") for name, value in said.items()}


def cluster_profile(cluster: str) -> dict[str, Any]:
    """The profile env/clusters/NAME.yaml: defaults of job keys, ``network``, ``data_dir``, ``environment``, the keys of `ASKS`, and
    the lists ``modules`` and ``env_files``.

    Raises ConfigError where there is no profile of that name, or where it has an unknown key or an invalid value.
    """
    folder = ROOT / "env" / "clusters"
    there = sorted(p.stem for p in folder.glob("*.yaml"))
    if cluster not in there:
        raise ConfigError(
            f"cluster={shown(cluster)}: there is no env/clusters/{shown(cluster)}.yaml, only {', '.join(there)}{declare.nearest(cluster, there)}"
        )
    path = folder / f"{cluster}.yaml"
    profile = {k: v for k, v in yaml_file.load(path, str(path)).items() if v not in ("", "null", "~")}
    lines = {" ".join(line.split("#")[0].split()) for line in path.read_text(encoding="utf-8").splitlines()}
    keys = (
        "partition",
        "account",
        "qos",
        "constraint",
        "reservation",
        "extra",
        *job_keys.IN_IMAGE,
        "gpus_per_node",
        "gpu_type",
        "cpus_per_rank",
        "time",
        "network",
    )
    for name, value in profile.items():
        if name in ("modules", "env_files"):
            pattern = r"[A-Za-z0-9_.+/-]{1,256}"
            if not isinstance(value, list) or not all(isinstance(v, str) and re.fullmatch(pattern, v) for v in value):
                raise ConfigError(f"{path}: '{name}' must be a list of names, each on its own line after '- '")
        elif name == "environment":
            if not re.fullmatch(r"/[A-Za-z0-9_.+/@=-]{1,256}", str(value)) or f"environment: {value}" not in lines:
                raise ConfigError(
                    f"{path}: 'environment' must be a line 'environment: /FOLDER' that names a venv or a conda environment"
                )
        elif name == "data_dir":
            if not str(value).startswith(("/", "~/")):
                raise ConfigError(f"{path}: 'data_dir: {shown(value)}' must be an absolute path")
        elif name in ASKS:
            pattern, form = ASKS[name]
            if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
                raise ConfigError(f"{path}: '{name}: {shown(value)}' {form}")
        elif name not in keys:
            raise ConfigError(
                f"{path}: unknown key '{shown(name)}'{declare.nearest(str(name), (*keys, *ASKS, 'modules', 'env_files', 'environment', 'data_dir'))}"
            )
        elif not isinstance(value, str):
            raise ConfigError(f"{path}: '{name}' must be one plain value")
    for module in profile.get("modules", ()):
        if f"- {module}" not in lines:
            raise ConfigError(
                f"{path}: 'modules' must have a line '- {module}', written like this: batch scripts read it too"
            )
    return profile


def env_variables(network: str, cluster: str) -> dict[str, str]:
    """The variables of the env files: common < the fabric's < the site's. Raises EnvFileError, or ConfigError for the profile."""
    profile = cluster_profile(cluster) if cluster else {}
    files = envfile.files_for(network, ROOT / "env", profile.get("env_files", ()))
    return envfile.merge(*(envfile.read(file) for file in files))
