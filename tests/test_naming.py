"""Names and first lines of docstrings follow the rules in CONTRIBUTING; known faults are in a list that shrinks."""

from __future__ import annotations

import ast

import pytest

from tests.support.naming import check_function, count_faults, find_faults, is_imperative, is_participle, new_faults


def test_no_new_naming_fault() -> None:
    assert new_faults() == []


def test_a_fault_beyond_the_list_is_found() -> None:
    known = count_faults(["participle a.py f", "first-word a.py g"])
    assert count_faults(["participle a.py other", "participle a.py f"]) - known == {"participle a.py": 1}


def test_class_names_are_used_once() -> None:
    assert [fault for fault in find_faults() if fault.startswith("class-twice")] == []


@pytest.mark.parametrize("name", ["begun", "told", "sound", "settled", "adding", "lent"])
def test_lone_participles_are_found(name: str) -> None:
    assert is_participle(name)


@pytest.mark.parametrize("name", ["create", "borrow_engine", "first_nonfinite", "feed", "ping", "is_trained"])
def test_verbs_are_no_participles(name: str) -> None:
    assert not is_participle(name)


@pytest.mark.parametrize("word", ["The", "Whether", "Returns", "What", "Adding", "Published"])
def test_first_words_that_are_no_imperative(word: str) -> None:
    assert not is_imperative(word)


@pytest.mark.parametrize("word", ["Return", "Process", "See", "Pass", "Embed", "Bring"])
def test_first_words_that_are_imperative(word: str) -> None:
    assert is_imperative(word)


def test_a_property_may_be_a_noun() -> None:
    tree = ast.parse('class A:\n    @property\n    def kept(self) -> int:\n        """The kept ones."""\n')
    (node,) = tree.body[0].body  # type: ignore[attr-defined]
    assert list(check_function("a.py", "A.kept", node)) == []
    node.decorator_list = []
    assert list(check_function("a.py", "A.kept", node)) == ["participle a.py A.kept", "first-word a.py A.kept"]
