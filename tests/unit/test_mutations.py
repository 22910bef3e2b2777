"""Each mutation applies to the product, and names tests that exist."""

from __future__ import annotations

from tests.helpers import ROOT
from tests.mutations.__main__ import all_mutations, fault_of

MUTATIONS = [mutation for mutations in all_mutations().values() for mutation in mutations]


def test_each_mutation_applies() -> None:
    assert len(MUTATIONS) > 90
    assert list(filter(None, map(fault_of, MUTATIONS))) == []


def test_each_mutation_names_tests_that_exist() -> None:
    for name in {name for mutation in MUTATIONS for name in mutation.tests.split()}:
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        if test:
            function = test.partition("[")[0]
            assert f"def {function}(" in (ROOT / path).read_text(), name
