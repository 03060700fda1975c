"""
YAML files of options: read so that nothing in them is lost, and written without secrets.

PyYAML takes the last of two equal keys in silence. Here they are refused, with the lines of both.

What is written may be mailed or published. So an option that holds a secret is left out, and so are variables under
`env`, whose names say little about their values: of them the file has the names alone. Standard library only at import.
"""

from __future__ import annotations

from typing import Any

from hf_hybrid.records.readings import as_dict
from hf_hybrid.records.redaction import has_secret, is_secret_name

ENVIRONMENT = "env"
"""Key of a YAML file under which environment variables stand."""


def read_options(text: str) -> Any:
    """
    Return what the text of a YAML file holds. A `ValueError` says what is wrong and in which line; it shows no values,
    because one may be a secret.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a mapping that has a key twice. At the root are options, in whose names a dash is an underscore."""

        depth = 0

        def compose_mapping_node(self, anchor):
            self.depth += 1
            mapping = super().compose_mapping_node(anchor)
            self.depth -= 1
            lines: dict[str, tuple[str, int]] = {}
            for key, _ in mapping.value:
                name, line = str(key.value), key.start_mark.line + 1
                option = name if self.depth else name.replace("-", "_")
                if option in lines:
                    twins = "`{}` in line {} and `{}` in line {}".format(*lines[option], name, line)
                    raise _Twins(f"has {twins}, and only one of them can count. Delete the other")
                lines[option] = name, line
            return mapping

    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f" in line {mark.line + 1}"
        raise ValueError(f"is not valid YAML: {error.problem or error.context}{where}") from None
    except _Twins:
        raise
    except RecursionError:
        raise ValueError("is nested too deeply. It takes lines `learning_rate: 0.001`") from None
    except (yaml.YAMLError, ValueError) as error:  # a character that YAML does not take, a date that does not exist
        raise ValueError(f"is not valid YAML: {error}") from None


class _Twins(ValueError):
    """A mapping has a key twice."""


def holds_secret(name: str, value: Any) -> bool:
    """Whether an option holds a secret: its name says so, or a name or a text in its value does."""
    if isinstance(value, dict):
        inside = any(holds_secret(str(key), item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        inside = any(holds_secret("", item) for item in value)
    else:
        inside = isinstance(value, str) and has_secret(value)
    return inside or value not in (None, "", False, True) and is_secret_name(name)


def split_private(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that may stand in a file, and those that hold a secret. What is under `env` is in neither."""
    private = {name: value for name, value in options.items() if name != ENVIRONMENT and holds_secret(name, value)}
    return {name: value for name, value in options.items() if name not in (*private, ENVIRONMENT)}, private


def as_yaml(options: dict[str, Any]) -> str:
    """Return the text of a YAML file with the options, without what is private, which a comment names."""
    import yaml

    shown, private = split_private(options)
    left_out = [f"`{name}`" for name in private]
    left_out += [f"`{name}` under `{ENVIRONMENT}`" for name in as_dict(options.get(ENVIRONMENT))]
    head = f"# Left out, because it may be secret: {', '.join(left_out)}.\n" if left_out else ""
    return head + yaml.safe_dump(shown, sort_keys=False)
