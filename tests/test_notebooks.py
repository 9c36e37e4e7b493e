"Notebooks read well, build on each other in order, and run through papermill from any folder."
import ast
import json
import re
from pathlib import Path
from statistics import median

import pytest

from conftest import run_notebook

ROOT = Path(__file__).resolve().parent.parent
NEED_MACRO = 'filter_nasbench', 'rank_of_paths', 'search_nasbench'
LIBRARY = sorted((ROOT/'nbs').glob('[0-9]*.ipynb'))


def code_cells(path):
    "The source of every code cell of a notebook."
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    return [''.join(c['source']) for c in cells if c['cell_type'] == 'code']


def n_lines(source):
    "Lines of code and comments; blank ones and nbdev's directives don't count."
    return sum(bool(line.strip()) and not line.startswith('#|') for line in source.splitlines())


def module_numbers():
    "Number of the notebook that exports each module."
    exports = {nb: re.search(r'^#\|\s*default_exp\s+(\S+)', '\n'.join(code_cells(nb)), re.M) for nb in LIBRARY}
    return {m[1]: int(nb.name.split('_')[0]) for nb, m in exports.items() if m}


def local_imports(path):
    "Modules of the library that a module imports, also inside functions."
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            base = 'greedynasv2.'*bool(node.level) + (node.module or '')
            names = [base] if base.rstrip('.') != 'greedynasv2' else [f'greedynasv2.{n}' for n in names]
        yield from (n.split('.')[1] for n in names if n.startswith('greedynasv2.'))


def test_exported_cells_are_short():
    "Half of the exported cells have at most 12 lines, none has more than 25."
    lengths = {(nb.name, source): n_lines(source) for nb in LIBRARY for source in code_cells(nb)
               if re.search(r'^#\|\s*export', source, re.M)}
    assert lengths, 'no notebook exports anything'
    long = [f'{name}, {n} lines: {source[:60]!r}' for (name, source), n in lengths.items() if n > 25]
    assert not long, '\n'.join(long)
    assert median(lengths.values()) <= 12


def test_modules_import_only_lower_numbers():
    "The number of a notebook is its place in the order of reading."
    number = module_numbers()
    assert number, 'no numbered notebook has a default_exp'
    wrong = [f'{m} ({n}) imports {dep} ({number[dep]})' for m, n in number.items()
             for dep in local_imports(ROOT/f'greedynasv2/{m}.py') if number.get(dep, -1) >= n]
    assert not wrong, '\n'.join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize('name, parameters', [
    ('explore_spaces', dict(space='toy', n_steps=20)),
    ('benchmark', dict(repeats=1, eval_repeats=1, batch_size=2, small_batch=2, eval_size=32, n_images=2, n_paths=20,
                       n_searched=8, n_accepted=2, n_classified=200, filter_batch=8, n_layers=[2, 4], n_ops=[3, 5],
                       n_events=2000, out='benchmark.json')),
    ('filter_nasbench', dict(shares=[.01], n_seeds=1, dim=8, ablations=False, out='filter.json')),
    ('rank_of_paths', dict(n_seeds=1, epochs=6, m=100, filter_dim=8, paths_per_epoch=20, out='rank.json')),
    ('search_nasbench', dict(n_seeds=2, n_seeds_offspring=1, budgets=[60, 100], dim=8, out='search.json')),
    ('reproduce_nasbench', dict(results='measured')),
    ('train_supernet', dict(space='toy', epochs=6, m=60, batch_size=16, n_train=320, filter_dim=8, run_dir='run')),
])
def test_notebook_runs_headless(name, parameters, tmp_path, monkeypatch, data_file):
    "Papermill runs it from a folder that is not the project's, and its output stays small."
    if name in NEED_MACRO:
        data_file('nas-bench-macro_cifar10.json')
    monkeypatch.chdir(tmp_path)
    out = tmp_path/f'{name}.ipynb'
    run_notebook(name, out, parameters)
    assert out.stat().st_size < 3e6
