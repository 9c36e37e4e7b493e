"""How much a line, a cell and a package hold, next to packages that we learn from: python tests/code_measures.py

nodes a line: nodes of the syntax tree for each line that is neither blank nor a comment. A reader parses statements,
not lines: few nodes a line read better than few lines.
"""
import ast
import importlib.util
import json
import re
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = dict(greedynasv2=ROOT, greedynasv2_studies=ROOT/'studies')      # package -> folder of its settings.ini
ANCHORS = 'fastcore', 'fastai', 'timm', 'pymoo'
WIDTH = 100


def sources(folder):
    "Text of every module of a package; private modules, such as nbdev's index, aside."
    files = [f for f in sorted(folder.rglob('*.py')) if f.name == '__init__.py' or not f.name.startswith('_')]
    return {f: f.read_text(encoding='utf-8') for f in files if 'tests' not in f.relative_to(folder).parts}


def n_nodes(source):
    "Nodes of the syntax tree."
    return sum(1 for _ in ast.walk(ast.parse(source)))


def code_lines(source):
    "Lines that are neither blank nor a comment."
    return [line for line in source.splitlines() if line.strip() and not line.strip().startswith('#')]


def exported_cells(source):
    "Cells of a module that nbdev wrote; the list of its names aside."
    cells = [cell.partition('\n')[2] for cell in re.split(r'(?m)^# %% ', source)[1:]]
    return [cell for cell in cells if cell.strip() and not cell.startswith('__all__')]


def public_names(source):
    "Names that nbdev lists in `__all__`; of another module, its top-level functions and classes."
    tree = ast.parse(source)
    for node in tree.body:
        if not isinstance(node, ast.Assign) or getattr(node.targets[0], 'id', '') != '__all__':
            continue
        if isinstance(node.value, ast.List):
            return [name.value for name in node.value.elts if isinstance(name, ast.Constant)]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith('_')]


def is_check(node):
    "Is this an assertion or a call of one of fastcore's tests?"
    if isinstance(node, ast.Assert):
        return True
    return isinstance(node, ast.Call) and getattr(node.func, 'id', '').startswith('test_')


def lesson_measures(notebooks):
    "Visible checks, and cells that end in a value, for each exported cell; error checks (`test_fail`) are checks too."
    exported = checks = values = 0
    for nb in notebooks:
        for cell in json.loads(nb.read_text(encoding='utf-8'))['cells']:
            source = ''.join(cell['source'])
            if cell['cell_type'] != 'code':
                continue
            if re.search(r'^#\|\s*export', source, re.M):
                exported += 1
            elif not source.startswith('#|'):
                body = ast.parse(source).body
                checks += sum(map(is_check, ast.walk(ast.Module(body, []))))
                values += bool(body) and isinstance(body[-1], ast.Expr) and not is_check(body[-1].value)
    return dict(checks_a_cell=checks / exported, values_a_cell=values / exported)


def style_faults(folder):
    "How often a line holds several statements or a lambda gets a name (E701, E702, E731), by ruff if it is installed."
    ruff = Path(sys.executable).with_name('ruff')
    if not ruff.exists():
        return None
    command = [ruff, 'check', '--isolated', '--select', 'E701,E702,E731', '--output-format', 'json', folder]
    return len(json.loads(subprocess.run(command, capture_output=True, text=True).stdout))


def measure(folder, notebooks=()):
    "All measures of the package in `folder`."
    texts = sources(folder)
    lines = [line for text in texts.values() for line in code_lines(text)]
    cells = [cell for text in texts.values() for cell in exported_cells(text)]
    names = Counter(name for text in texts.values() for name in public_names(text))
    row = dict(lines=len(lines), nodes_a_line=sum(map(n_nodes, texts.values())) / len(lines),
               long_lines=100 * sum(len(line) > WIDTH for line in lines) / len(lines), faults=style_faults(folder),
               names=len(names),
               twice=sorted(name for name, n in names.items() if n > 1))
    if cells:
        row |= dict(cells=len(cells), nodes_a_cell=statistics.mean(map(n_nodes, cells)),
                    lines_a_cell=statistics.median(len(code_lines(cell)) for cell in cells))
    if notebooks:
        row |= lesson_measures(notebooks)
    return row


def measure_ours(root=ROOT):
    "Measures of the library and the studies of a checkout."
    found = {}
    for package, home in OURS.items():
        home = root/home.relative_to(ROOT)
        if (home/package).is_dir():
            found[package] = measure(home/package, sorted((home/'nbs').glob('[0-9]*.ipynb')))
    return found


def main(root=ROOT):
    "Print the table: ours, then the anchors that are installed."
    found = measure_ours(Path(root).resolve())
    for name in ANCHORS:
        spec = importlib.util.find_spec(name)
        if spec:
            found[name] = measure(Path(spec.origin).parent)
    columns = dict(lines='{:,}', nodes_a_line='{:.1f}', long_lines='{:.1f}', faults='{}', cells='{}',
                   lines_a_cell='{:g}', nodes_a_cell='{:.0f}', names='{}', checks_a_cell='{:.2f}',
                   values_a_cell='{:.2f}')
    print(f'long_lines: percent of more than {WIDTH} columns; faults: E701, E702, E731; _a_cell: of exported cells')
    table = [['', *columns]]
    for name, row in found.items():
        table.append([name, *('-' if row.get(c) is None else form.format(row[c]) for c, form in columns.items())])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print('  '.join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    for package in OURS:
        if package in found:
            print(f'{package}: names that two modules have: {", ".join(found[package]["twice"]) or "none"}')


if __name__ == '__main__':
    main(*sys.argv[1:])
