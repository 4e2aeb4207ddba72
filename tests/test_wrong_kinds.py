"""Text where a number is wanted, and every other wrong kind of value, for every key there is: one form of words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from txl_lightning.config import SECTIONS, ConfigError, TopConfig, build_section, load
from txl_lightning.errors import yaml_text
from txl_lightning.keys import PLUGGED
from txl_lightning.options import COMMANDS

KINDS: dict[str, tuple[str, list[Any]]] = {
    "int": ("a whole number", ["many", 3.5, "3.5", True, [1], {"a": 1}, None]),
    "float": ("a number", ["fast", True, [0.5], {"a": 1}, None]),
    "int | float": ("a number", ["fast", True, [0.5], {"a": 1}, None]),
    "bool": ("true or false", ["perhaps", 3, 0.5, [True], {"a": 1}, None]),
    "str": ("text", [[1], {"a": 1}, None]),
    "tuple[int, ...]": ("a list of whole numbers", ["a", 3, ["a"], [0.5], [[1]], {"a": 1}, None]),
    "tuple[float, ...]": ("a list of numbers", ["a", 0.5, ["a"], [[1]], {"a": 1}, None]),
    "tuple[float, float]": ("a list of 2 numbers", ["a", 0.5, ["a", "b"], {"a": 1}, None]),
    "tuple[bool, ...]": ("a list of true and false", ["a", True, ["a"], [3], {"a": 1}, None]),
    "tuple[str, ...]": ("a list of texts", ["a", 3, [[1]], {"a": 1}, None]),
}
"""The type of a key: what it is called, and values of other kinds."""

for kind in ("int", "float", "str"):
    words, wrong = KINDS[kind]
    KINDS[f"{kind} | None"] = (f"{words} or null", wrong[:-1])


def schemas() -> Iterator[tuple[str, type]]:
    """The path of its keys and the schema of every section, command, memory, corpus and callback."""
    yield "", TopConfig
    yield from SECTIONS.items()
    yield from (("", command.options) for command in COMMANDS.values())
    for group, registry in PLUGGED.items():
        for name in registry.names():
            yield f"callbacks.{name}" if group == "callbacks" else group, registry.get(name).config


KEYS = [(path, schema, item) for path, schema in schemas() for item in dataclasses.fields(schema)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_refuses_other_kinds_in_the_same_words(kind: str) -> None:
    keys = [(path, schema, item) for path, schema, item in KEYS if item.type == kind]
    assert keys
    for path, schema, item in keys:
        dotted = f"{path}.{item.name}" if path else item.name
        words, wrong = KINDS[kind]
        for value in wrong:
            with pytest.raises(ConfigError) as refused:
                build_section(schema, {item.name: value}, path=path)
            error = refused.value
            assert str(error).startswith(f"{dotted}={yaml_text(value)}: must be {words}; ")
            assert item.metadata["help"] in error.cure and "\n" not in str(error)


def test_every_kind_of_key_is_tried() -> None:
    assert {item.type for *_, item in KEYS} <= {*KINDS, "Any"}


def test_keys_of_several_kinds_refuse_by_themselves() -> None:
    """Or take the value; but they say nothing in the words of a library."""
    tried = [(path, schema, item) for path, schema, item in KEYS if item.type == "Any"]
    for path, schema, item in tried:
        for value in ("x", 3, 0.5, True, None, [], ["x"], [3], [[1]], {"a": 1}, [{"a": 1}]):
            try:
                build_section(schema, {item.name: value}, path=path)
            except ConfigError as error:
                assert error.key.startswith(f"{path}.{item.name}" if path else item.name)
                assert not any(word in str(error) for word in ("Value '", "Node", "type '", "Config"))


@pytest.mark.parametrize("key", ["model.n_layer", "model.clamp_len", "eval.batch_size", "memory.mem_len", "seed"])
def test_numbers_that_nobody_can_mean_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}=9{{24}}: must be <= \d+; choose a "):
        load([f"{key}={'9' * 24}"])
    with pytest.raises(ConfigError, match=rf"^{key}=-9{{24}}: must be >= -?\d+; choose a |must be -1 or >= 1"):
        load([f"{key}=-{'9' * 24}"])
