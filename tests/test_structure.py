"""`embed.structure`: nested features flattened, matched with values, packed again, and named."""

import collections

import cases
import pytest

import embed
from embed import structure

TABLE = embed.TableConfig(4, 2, name="t")
FEATURE = embed.FeatureConfig(TABLE)
Pair = collections.namedtuple("Pair", ["left", "right"])
NESTED = {"b": [FEATURE, FEATURE], "a": Pair(FEATURE, {"x": FEATURE})}
PATHS = [("a", "left"), ("a", "right", "x"), ("b", "0"), ("b", "1")]


def test_dict_keys_are_sorted_and_sequences_keep_their_order():
  assert [path for path, _ in structure.flatten_features(NESTED)] == PATHS
  assert list(structure.flatten_features(FEATURE)) == [((), FEATURE)]


def test_packing_undoes_matching():
  values = {"b": [1, 2], "a": Pair(3, {"x": None})}
  flat = {path: value for path, _, value in structure.match(NESTED, values, "values")}
  assert flat == dict(zip(PATHS, [3, None, 1, 2], strict=True))
  assert structure.pack(NESTED, values, flat) == values


def test_none_replaces_a_container_only_if_allowed():
  assert list(structure.match(NESTED, {"a": None}, "weights")) == []
  with pytest.raises(TypeError, match="features at 'a': expected a Pair like the feature config"):
    list(structure.match(NESTED, {"a": None}, "features", none_allowed=False))


def test_another_structure_is_refused():
  match = lambda values: list(structure.match(NESTED, values, "values"))
  kinds = [
    ([1], "values: expected a dict like the feature config"),
    ({"b": (1, 2)}, "values at 'b': expected a list like the feature config, got tuple"),
  ]
  cases.refused(kinds, match, TypeError)
  keys = [
    ({"c": 1}, r"values: unknown features \['c'\]; .* \['a', 'b'\]"),
    ({"b": [1]}, "values at 'b': expected 2 entries like the feature config, got 1"),
  ]
  cases.refused(keys, match)


def test_tables_are_named_in_the_order_of_first_use():
  other = embed.TableConfig(4, 2)
  config = {"b": FEATURE, "a": embed.FeatureConfig(other), "c": FEATURE}
  assert structure.name_tables(config) == {"table_0": other, "t": TABLE}
  again = embed.FeatureConfig(embed.TableConfig(4, 2, name="t"))
  wrong = [
    ({}, r"holds no embed\.FeatureConfig"),
    ([FEATURE, again], "Multiple tables with name t found"),
    ({"a": {"b": FEATURE}, "a/b": FEATURE}, "Two features have the same path, 'a/b'"),
    ({"a": 3}, r"any nesting of dicts.*Got 3"),
  ]
  cases.refused(wrong, structure.name_tables)
