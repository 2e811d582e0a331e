"""Random JSON schemas of what is supported, for hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "id", "first name", 'quo"te', "ключ"])


def _integers() -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.tuples(st.integers(-50, 50), st.integers(0, 60))
    return bounds.map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]})


def _strings() -> st.SearchStrategy[dict[str, Any]]:
    lengths = st.tuples(st.integers(0, 3), st.integers(0, 6))
    bounded = lengths.map(lambda b: {"type": "string", "minLength": b[0], "maxLength": b[0] + b[1]})
    patterns = st.sampled_from(["^[a-c]{1,4}$", "^x(yz)*$", "^\\d{2}-\\d{2}$"])
    return bounded | patterns.map(lambda pattern: {"type": "string", "pattern": pattern})


def _arrays(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    sizes = st.tuples(st.integers(0, 2), st.integers(0, 2))
    return st.tuples(children, sizes).map(
        lambda x: {"type": "array", "items": x[0], "minItems": x[1][0], "maxItems": x[1][0] + x[1][1]}
    )


def _objects(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def made(properties: dict[str, Any], required: set[str]) -> dict[str, Any]:
        names = [name for name in properties if name in required]
        return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}

    return st.builds(made, st.dictionaries(NAMES, children, max_size=3), st.sets(NAMES))


LEAVES = (
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": {"k": [1, "é"]}}, {"enum": ["x", 3, None]}])
    | _integers()
    | _strings()
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda children: (
        _arrays(children) | _objects(children) | st.lists(children, min_size=1, max_size=3).map(lambda c: {"anyOf": c})
    ),
    max_leaves=6,
)
