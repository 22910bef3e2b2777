"""Reads YAML files of keys. Every value is the text in the file."""

from collections import Counter
from pathlib import Path
from typing import Any

from recipes.core import files
from recipes.core.errors import ConfigError, shown

MAX_YAML = 1 << 16  # bytes of a file of keys; a larger one could take many seconds to read


def load(path: Path, given: str) -> dict[str, Any]:
    """The mapping in the file ``path``. A plain value is its text, not a value of YAML 1.1, which reads 1:00:00 as the number 3600.

    given: names the file in a message. Raises ConfigError.
    """
    import yaml  # OmegaConf's parser; imported only when a file is read, since the import is slow

    try:
        loader = yaml.BaseLoader(files.read_bounded(path, MAX_YAML).decode("utf-8"))
        node = loader.get_single_node()
        content = loader.construct_document(node) if node else None
        keys = node.value if isinstance(node, yaml.MappingNode) else []
        names = Counter(str(name.value) for name, _ in keys)
        if names and max(names.values()) > 1:
            raise ValueError(f"'{shown(names.most_common(1)[0][0])}' is given twice")
    except OSError as error:
        raise ConfigError(f"{given}: cannot be read ({error.strerror}); give the path of a YAML file") from None
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError) as error:
        raise ConfigError(
            f"{given}: is not YAML ({shown(' '.join(str(error).split()), 120)}); write 'key: value' lines"
        ) from None
    if content in (None, ""):
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{given}: is not a mapping; write 'key: value' lines")
    return content
