"""Tests that names and first lines of docstrings follow the rules in CONTRIBUTING, and tests the program that checks
the rules.
"""

from __future__ import annotations

import ast

import pytest

from tests.support.naming import (
    LONGEST_DESCRIPTION,
    check_descriptions,
    check_function,
    find_faults,
    is_imperative,
    is_participle,
)


def test_names_and_first_lines_follow_the_rules() -> None:
    assert list(find_faults()) == []


@pytest.mark.parametrize("name", ["begun", "told", "sound", "settled", "adding", "lent"])
def test_function_name_that_is_only_a_participle_is_found(name: str) -> None:
    assert is_participle(name)


@pytest.mark.parametrize("name", ["create", "borrow_engine", "first_nonfinite", "feed", "ping", "is_trained"])
def test_verbs_are_not_taken_for_participles(name: str) -> None:
    assert not is_participle(name)


@pytest.mark.parametrize("word", ["The", "Whether", "Returns", "What", "Adding", "Published"])
def test_first_word_that_is_not_an_imperative_is_rejected(word: str) -> None:
    assert not is_imperative(word)


@pytest.mark.parametrize("word", ["Return", "Process", "See", "Pass", "Embed", "Bring"])
def test_imperative_first_word_is_accepted(word: str) -> None:
    assert is_imperative(word)


def test_property_name_may_be_a_noun() -> None:
    tree = ast.parse('class A:\n    @property\n    def kept(self) -> int:\n        """The kept ones."""\n')
    (node,) = tree.body[0].body  # type: ignore[attr-defined]
    assert list(check_function("a.py", "A.kept", node)) == []
    node.decorator_list = []
    assert list(check_function("a.py", "A.kept", node)) == ["participle a.py A.kept", "first-word a.py A.kept"]


@pytest.mark.parametrize("text", ["it is not used", "These keys", "a" * (LONGEST_DESCRIPTION + 1)])
def test_unclear_descriptions_of_keys_are_found(text: str) -> None:
    (fault,) = check_descriptions("a.py", ast.parse(f"Field(1, description={text!r})"))
    assert " a.py " in fault
    assert not list(check_descriptions("a.py", ast.parse("Field(1, description='number of engines')")))
