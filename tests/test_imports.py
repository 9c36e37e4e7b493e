"Who imports whom: studies next to the library, never below it; only lower numbers; no torch where a watcher is."
import ast
import subprocess
import sys

import pytest

from import_graph import (
    NOT_YET,
    PACKAGES,
    PAGE,
    ROOT,
    WITHOUT_TORCH,
    edges,
    imported,
    needs_torch,
    numbers,
    page_with_graph,
    parse,
)

LOADS_TORCH = 'import sys, greedynasv2.{}; sys.exit("torch" in sys.modules)'


def test_modules_import_only_lower_numbers():
    "The number of a notebook is its place in the order of reading."
    for package in PACKAGES:
        number = numbers(package)
        assert number and len(set(number.values())) == len(number), f'{package}: two notebooks have one number'
        for name, targets in edges(package).items():
            module = name.split('.')[1]
            own = [target.split('.')[1] for target in targets if target.split('.')[0] == package]
            assert not [t for t in own if number[t] >= number[module]], f'{name} ({number[module]}) imports {own}'


def test_library_knows_no_studies():
    "Studies import the library, never the reverse: neither its modules nor its notebooks."
    for module in numbers('greedynasv2'):
        names = imported(ast.walk(parse('greedynasv2', module)), 'greedynasv2')
        assert not [n for n in names if n.startswith('greedynasv2_studies')], module
    for nb in (ROOT/'nbs').glob('*.ipynb'):
        assert 'greedynasv2_studies' not in nb.read_text(encoding='utf-8'), nb.name


@pytest.mark.parametrize('module', WITHOUT_TORCH)
def test_watching_needs_no_torch(module):
    "What reads a run folder imports no torch; the list of those that still do is honest."
    if module not in numbers('greedynasv2'):
        assert module in NOT_YET, f'{module} is gone: import_graph.py still names it'
        pytest.skip(f'{module} is not made yet')
    loads = subprocess.run([sys.executable, '-c', LOADS_TORCH.format(module)], cwd=ROOT).returncode
    assert loads in (0, 1)
    assert bool(loads) == (module in NOT_YET), f'{module}: NOT_YET of import_graph.py says otherwise'


def test_statements_agree_with_what_is_loaded():
    "The graph's marks come from import statements; a fresh process says the same of every module of the library."
    code = ('import importlib, sys\n'
            'for module in sys.argv[1:]: importlib.import_module(f"greedynasv2.{module}")\n'
            'sys.exit("torch" in sys.modules)')
    light = sorted(set(numbers('greedynasv2')) - needs_torch('greedynasv2'))
    assert not light or subprocess.run([sys.executable, '-c', code, *light], cwd=ROOT).returncode == 0, light


def test_drawn_graph_is_up_to_date():
    "CONTRIBUTING.md shows the imports as they are."
    assert PAGE.read_text(encoding='utf-8') == page_with_graph(), 'Run `python tests/import_graph.py`.'
