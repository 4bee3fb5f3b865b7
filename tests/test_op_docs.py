"""The examples in the docstrings run."""

import doctest

import pytest

from jax_megamoe import op


@pytest.mark.parametrize("function", [op.moe_mlp, op.moe], ids=lambda f: f.__name__)
def test_example(function):
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner()
    for test in finder.find(function, function.__name__, globs={}):
        runner.run(test)
    assert runner.tries > 0 and runner.failures == 0
