"""Draw which module imports which: python tests/import_graph.py writes the graph into CONTRIBUTING.md.

An arrow is left out where others already say it: `spaces -> core` when `spaces -> facts -> core`.
"""
import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = dict(greedynasv2=ROOT, greedynasv2_studies=ROOT/'studies')      # package -> folder of its settings.ini
PAGE = ROOT/'CONTRIBUTING.md'
BEGIN, END = '<!-- import graph: begin -->', '<!-- import graph: end -->'
# What a watcher of a run needs: these import no torch, except those that still do
WITHOUT_TORCH = 'core', 'ops', 'facts', 'merger', 'events', 'runs', 'viz', 'widgets'
NOT_YET = ()
TORCH = 'torch', 'torchvision', 'timm', 'safetensors.torch'      # packages that import torch


def numbers(package):
    "Module -> number of the notebook that exports it."
    found = {}
    for nb in sorted((PACKAGES[package]/'nbs').glob('[0-9]*.ipynb')):
        cells = json.loads(nb.read_text(encoding='utf-8'))['cells']
        code = '\n'.join(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code')
        exports = re.search(r'^#\|\s*default_exp\s+(\S+)', code, re.M)
        if exports:
            found[exports[1]] = nb.name.split('_')[0]
    return found


def imported(nodes, package):
    "Full names that import statements among `nodes` may mean: modules, and names in them."
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = [package] * bool(node.level) + [node.module] * bool(node.module)
            yield '.'.join(base)
            yield from ('.'.join([*base, alias.name]) for alias in node.names)


def at_the_top(tree):
    "Nodes that run when a module is imported: not those inside functions, nor what is for type checkers alone."
    todo = list(tree.body)
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith('TYPE_CHECKING'):
            todo += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)


def parse(package, module):
    return ast.parse((PACKAGES[package]/package/f'{module}.py').read_text(encoding='utf-8'))


def edges(package, top_only=False):
    "Full name of each module -> full names of modules of ours that it imports, also inside functions."
    ours = {f'{p}.{module}' for p in PACKAGES for module in numbers(p)}
    found = {}
    for module in numbers(package):
        tree = parse(package, module)
        nodes = at_the_top(tree) if top_only else ast.walk(tree)
        found[f'{package}.{module}'] = ours & set(imported(nodes, package))
    return found


def reach(graph, start):
    "Everything that `start` leads to."
    seen, todo = set(), [start]
    while todo:
        for target in graph.get(todo.pop(), ()):
            if target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


def needs_torch(package):
    "Modules that import torch when they are imported themselves, through others of ours too."
    graph = {name: targets for p in PACKAGES for name, targets in edges(p, top_only=True).items()}
    direct = set()
    for p in PACKAGES:
        for module in numbers(p):
            names = imported(at_the_top(parse(p, module)), p)
            if any(name == t or name.startswith(f'{t}.') for name in names for t in TORCH):
                direct.add(f'{p}.{module}')
    return {module for module in numbers(package)
            if ({f'{package}.{module}'} | reach(graph, f'{package}.{module}')) & direct}


def mermaid():
    "The graph as text that GitHub and JupyterLab draw."
    graph = {name: targets for package in PACKAGES for name, targets in edges(package).items()}
    short = {name: name.replace('.', '_') for name in graph}
    lines = ['```mermaid', 'flowchart BT']
    light = []
    for package in PACKAGES:
        heavy = needs_torch(package)
        lines.append(f'  subgraph {package}')
        for module, number in numbers(package).items():
            name = f'{package}.{module}'
            lines.append(f'    {short[name]}["{number} {module}"]')
            if module not in heavy:
                light.append(short[name])
        lines.append('  end')
    for name, targets in graph.items():
        for target in sorted(targets):
            if not any(target in reach(graph, other) for other in targets - {target}):
                lines.append(f'  {short[name]} --> {short[target]}')
    lines.append('  classDef light stroke-width:3px,stroke-dasharray:6')
    if light:
        lines.append(f'  class {",".join(light)} light')
    return '\n'.join([*lines, '```'])


def page_with_graph():
    "CONTRIBUTING.md with the graph as it is now."
    text = PAGE.read_text(encoding='utf-8')
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f'{before}{BEGIN}\n{mermaid()}\n{END}{after}'


if __name__ == '__main__':
    new = page_with_graph()
    if sys.argv[1:] == ['--check']:
        sys.exit(PAGE.read_text(encoding='utf-8') != new)
    PAGE.write_text(new, encoding='utf-8')
