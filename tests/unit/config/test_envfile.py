"""Env files: read as dash and bash read them, refused where the two could differ; and the files
that are shipped.
"""

from __future__ import annotations

import os
import re
import shutil
import string
import subprocess
from pathlib import Path

import pytest

from recipes.core.config import envfile, profiles
from recipes.core.errors import ConfigError
from tests.helpers import ROOT, use_root

ENV_DIR = ROOT / "env"
SHIPPED = {"common", "infiniband", "roce", "ethernet", "efa", "gcp-a3", "slingshot", "debug"}
SHELLS = ["dash", "bash", "bash --posix"]


def words(text: str) -> list[str]:
    return text.split()


def assignments(text: str) -> dict[str, str]:
    """The variables in the output of `env -0`, without the shell's ``_``."""
    items = [item for item in text.split("\0") if item and not item.startswith("_=")]
    return dict(item.split("=", 1) for item in items)


def read_by_shell(shell: str, files: list[Path], cwd: Path) -> list[dict[str, str]]:
    """What `set -a; . file` adds to an empty environment, for each file, in one shell; it fails on
    any message.
    """
    argv = shell.split()
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    cwd.mkdir(parents=True, exist_ok=True)
    script = 'for f do ( set -a; . "$f" && exec env -0 ) || exit 1; printf "=\\0"; done'
    argv += ["-c", script, "sh", "/dev/null", *map(str, files)]
    done = subprocess.run(
        argv, env={"PATH": "/usr/bin:/bin"}, cwd=cwd, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    bare, *read = map(assignments, f"\0{done.stdout.decode('ascii')}".split("\0=\0")[:-1])
    assert not list(cwd.iterdir()), "something in an env file was run"
    for variables in read:
        for name, value in bare.items():
            assert variables.pop(name, None) == value, "an env file changed the shell's own"
    return read


def test_settings_comments_and_blank_lines_are_accepted(tmp_path: Path) -> None:
    text = (
        '# one\n\n \t\n  # another: $(x) `y`\nA=1\nB_2=\n_c="two '
        'words"\nD==mlx5_0:1,^x\nE=""\nF="# \'~*!&;|<>"'
    )
    expected = {
        "A": "1",
        "B_2": "",
        "_c": "two words",
        "D": "=mlx5_0:1,^x",
        "E": "",
        "F": "# '~*!&;|<>",
    }
    assert envfile.parse(text, "x.env") == expected
    assert_shells_agree(text, tmp_path)


def test_names_similar_to_refused_ones_are_accepted() -> None:
    text = (
        "NCCL_IB_PKEY TOKENIZERS_PARALLELISM OMP_NUM_THREADS NCCL_NET_PLUGIN CUDA_DEVICE_ORDER "
        "PASSAGE BYPASS RANKS"
        " MY_RANK FI_EFA_FORK_SAFE MALLOC_ARENA_MAX path TORCH_NCCL_RANKS_PER_ROOT"
    )
    for name in words(text):
        assert envfile.parse(f"{name}=1", "x") == {name: "1"}


BAD_LINES = (
    # expanded, executed or split by a shell
    "A=$(touch x)",
    'A="$(touch x)"',
    "A=`touch x`",
    'A="${HOME:-`touch x`}"',
    "A=\\n",
    'A="a\\"; touch x; \\""',
    "A=b; touch x",
    "A=b touch x",
    "A=b ",
    "A=b#c",
    "A=b&touch x",
    "A=<(touch x)",
    "A=~",
    "A=*",
    "A={a,b}",
    "A=!!",
    # quotes
    'A=a"b"',
    'A="b',
    'A="b\nc"',
    'A="b"c',
    'A="b" ',
    'A="b"; touch x',
    "A='b'",
    # blanks, invisible and other characters
    "A =b",
    " A=b",
    "A=\tb",
    'A="b\tc"',
    "A=b\r",
    "# a comment\rtouch x",
    "A=b\0",
    "\ufeffA=b",
    "A=b\u2028B=c",
    "# \x1b[2J",
    "# \u202e",
    "A=\ud800",
    'A="é"',
    # names, and no setting at all
    "É=b",
    "1A=b",
    "A+=c",
    "A[0]=c",
    "A$(touch x)=c",
    "=b",
    "export A=b",
    ". ./other.env",
    "A",
    "A=1\nA=2",
)


def test_an_invalid_line_is_refused_in_one_line_without_its_value() -> None:
    for line in BAD_LINES:
        with pytest.raises(ConfigError) as caught:
            envfile.parse(f"# first\n\n{line.replace('b', 's3cret')}\n", "site.env")
        message = str(caught.value)
        assert re.match(r"site\.env:[34]: ", message), ascii(line)
        assert "s3cret" not in message
        assert message.isprintable(), ascii(line)


REFUSED_NAMES = words(
    "PATH HOME PYTHONPATH VIRTUAL_ENV CONDA_PREFIX LD_PRELOAD LD_LIBRARY_PATH GIT_SSH_COMMAND "
    "BASH_ENV ENV IFS PS4 CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES SLURM_NTASKS "
    "SBATCH_PARTITION SRUN_CPUS_PER_TASK RANK WORLD_SIZE LOCAL_RANK NODE_RANK MASTER_ADDR "
    "TORCHELASTIC_RUN_ID OMPI_COMM_WORLD_RANK PMI_RANK RECIPES_SPEC RECIPES_CODE CC "
    "TORCHINDUCTOR_CACHE_DIR TRITON_PTXAS_PATH TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD "
    "CUDA_INJECTION64_PATH OPENSSL_CONF SHELL SHELLOPTS DYLD_INSERT_LIBRARIES GCONV_PATH "
    "GLIBC_TUNABLES CXX TORCH_EXTENSIONS_DIR RDMAV_DRIVERS UCX_MODULE_DIR OMP_TOOL_LIBRARIES "
    "COMPILER_PATH GCC_EXEC_PREFIX HIP_VISIBLE_DEVICES SLURMD_NODENAME SALLOC_QOS GROUP_RANK "
    "ROLE_WORLD_SIZE RECIPES_CHECK RECIPES_ATTEMPT RECIPES_CONTAINER"
)
SECRET_NAMES = words(
    "AWS_SECRET_ACCESS_KEY HF_TOKEN api_key DB_PASS DB_PASSWD KEY TOKEN_2 My_Secret APIKEY "
    "PASSPHRASE"
)


def test_reserved_and_secret_names_are_refused_without_their_value() -> None:
    for names, reason in (
        (REFUSED_NAMES, "chooses which code runs"),
        (SECRET_NAMES, "looks like a secret, .*your own shell"),
    ):
        for name in names:
            with pytest.raises(ConfigError, match=rf"^f:1: {name} {reason}") as caught:
                envfile.parse(f"{name}=s3cret", "f")
            assert "s3cret" not in str(caught.value), name


@pytest.mark.timeout(10)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.env")
    (tmp_path / "latin.env").write_bytes(b"A=1\n# \xe9\n")
    (tmp_path / "large.env").write_bytes(b"#" * (envfile.MAX_BYTES + 1))
    for path, word in [
        (tmp_path / "missing.env", "No such file"),
        (tmp_path / "pipe.env", "not an ordinary file"),
        (Path("/dev/zero"), "not an ordinary file"),
        (tmp_path / "latin.env", "codec"),
        (tmp_path / "large.env", "larger than 65536 bytes"),
        (tmp_path / ("x" * 300), "File name too long"),
        (tmp_path / "a\nb.env", "No such file"),
        (Path("a\0b"), "null"),
    ]:
        with pytest.raises(ConfigError, match=rf"cannot be read \(.*{word}") as caught:
            envfile.read(path)
        assert str(caught.value).isprintable()


def test_variables_that_the_user_has_set_are_not_changed() -> None:
    environ = {"A": "mine", "B": ""}
    assert envfile.apply({"A": "1", "B": "2", "C": "3", "D": ""}, environ) == {"C": "3", "D": ""}
    assert environ == {"A": "mine", "B": "", "C": "3", "D": ""}


def test_the_fabrics_file_is_between_common_and_site() -> None:
    files = envfile.files_for("ethernet", ENV_DIR, ["clusters/a.env", "/etc/b.env"])
    shipped = [ENV_DIR / name for name in ("common.env", "ethernet.env", "clusters/a.env")]
    assert files == [*shipped, Path("/etc/b.env")]
    assert envfile.files_for("", ENV_DIR) == [ENV_DIR / "common.env"]
    assert envfile.files_for("~/x.env", ENV_DIR)[1] == Path.home() / "x.env"
    for network in ("./mine", "mine.env"):  # paths
        assert envfile.files_for(network, ENV_DIR) == [ENV_DIR / "common.env", Path(network)]


def test_an_unknown_network_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(
        ConfigError, match=r"^network=infinband: .*did you mean 'infiniband'\?"
    ) as caught:
        envfile.files_for("infinband", ENV_DIR)
    assert all(name in str(caught.value) for name in SHIPPED - {"common"})


@pytest.mark.parametrize("network", ["common", "a\nb", "~nosuchuser/x.env", "x" * 5000 + ".env"])
def test_an_impossible_network_is_refused_in_one_line(network: str) -> None:
    with pytest.raises(ConfigError) as caught:
        envfile.read(envfile.files_for(network, ENV_DIR)[1])
    message = str(caught.value)
    assert len(message) < 500
    assert message.isprintable()


PLAIN = string.ascii_letters + string.digits + "_.,:/@%+=^-"
QUOTABLE = "".join(set(map(chr, range(0x20, 0x7F))) - set('$`\\"'))


def is_accepted(text: str) -> bool:
    try:
        return bool(envfile.parse(text, "f"))
    except ConfigError:
        return False


def assert_shells_agree(text: str, tmp_path: Path) -> None:
    """Every shell reads the text as parse does."""
    (tmp_path / "f.env").write_text(text, encoding="ascii")
    expected = [envfile.parse(text, "f")]
    for shell in SHELLS:
        assert read_by_shell(shell, [tmp_path / "f.env"], tmp_path / "cwd") == expected, shell


def test_shells_read_each_accepted_character_literally(tmp_path: Path) -> None:
    """Each printable character alone, first, last and doubled, bare and quoted: all that parse
    takes, in one file.
    """
    bodies = [
        form.format(c)
        for c in map(chr, range(0x20, 0x7F))
        for form in ("{0}", "{0}b", "b{0}", "b{0}{0}:{0}/b")
    ]
    values = [f"{quote}{body}{quote}" for body in bodies for quote in ("", '"')]
    lines = [
        f"A{number}={value}" for number, value in enumerate(values) if is_accepted(f"A={value}")
    ]
    assert len(lines) == 4 * (len(PLAIN) + len(QUOTABLE))
    assert_shells_agree("\n".join(lines), tmp_path)


def test_shells_read_the_shipped_files_as_python_does(tmp_path: Path) -> None:
    files = sorted(ENV_DIR.glob("*.env"))
    assert {path.stem for path in files} == SHIPPED
    expected = [envfile.read(path) for path in files]
    for shell in SHELLS:
        assert read_by_shell(shell, files, tmp_path / "cwd") == expected


def test_the_readme_of_env_lists_every_fabric() -> None:
    readme = (ENV_DIR / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([\w-]+)` \|", readme, flags=re.MULTILINE))
    assert listed == SHIPPED - {"common", "debug"}


def test_the_example_profile_is_valid_and_shows_every_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = profiles.cluster_profile("example")
    assert example["modules"] == ["gcc/12", "cuda/12.4"]
    assert example["network"] in SHIPPED
    text = (ENV_DIR / "clusters" / "example.yaml").read_text(encoding="utf-8")
    (tmp_path / "env/clusters").mkdir(parents=True)
    uncommented = re.sub(r"^# ((?:[a-z_]+:|  - ).*)$", r"\1", text, flags=re.MULTILINE)
    (tmp_path / "env/clusters/all.yaml").write_text(uncommented)
    use_root(monkeypatch, tmp_path)
    known = {*profiles.DEFAULTS, *profiles.TEXTS, *profiles.LISTS} - {
        "reservation",
        "time",
        "container_runtime",
    }
    assert set(profiles.cluster_profile("all")) == known
