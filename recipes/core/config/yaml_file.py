"""YAML files of keys: every value as the text that is written there."""

import stat
from collections import Counter
from pathlib import Path
from typing import Any

from recipes.core.errors import ConfigError, shown

MAX_YAML = 1 << 16  # bytes of a file of keys; a larger one could take many seconds to read


def load(path: Path, given: str) -> dict[str, Any]:
    """The mapping in ``path``, every plain value as the text that stands there; ``given``: what names it in a message.

    Not as YAML 1.1 would type them, to which ``time: 1:00:00`` is the number 3600.
    """
    import yaml  # OmegaConf's own parser; imported where a file is read, since it costs as much as all else here

    try:
        if not stat.S_ISREG(path.stat().st_mode):  # asked first: open() on a named pipe would wait for a writer
            raise ValueError("no ordinary file")
        with open(path, "rb") as file:
            text = file.read(MAX_YAML + 1)
        if len(text) > MAX_YAML:
            raise ValueError(f"larger than {MAX_YAML} bytes")
        loader = yaml.BaseLoader(text.decode("utf-8"))
        node = loader.get_single_node()
        content = loader.construct_document(node) if node else None
        keys = node.value if isinstance(node, yaml.MappingNode) else []
        names = Counter(str(name.value) for name, _ in keys)
        if names and max(names.values()) > 1:
            raise ValueError(f"'{shown(names.most_common(1)[0][0])}' stands there twice")
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
