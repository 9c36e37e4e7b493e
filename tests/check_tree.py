"Are the notebooks clean, small and tagged, and is the library what they export? `make test` asks this first."
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_MB = 3
STALE = {'.ipynb': 'not clean', '.py': 'not what the notebooks export', '.toml': 'not what settings.ini says'}
# Notebooks that papermill gives parameters to, as file patterns
WITH_PARAMETERS = ['explore_spaces.ipynb', 'benchmark.ipynb', 'filter_nasbench.ipynb', 'rank_of_paths.ipynb',
                   'search_nasbench.ipynb', 'reproduce_nasbench.ipynb', 'train_supernet.ipynb', 'search.ipynb',
                   'retrain.ipynb', 'transfer_detection.ipynb', 'watch_*.ipynb']


def copy_tree(dest):
    "Copy what nbdev reads and writes to `dest`, without the modules, which the export writes."
    for name in ['settings.ini', 'setup.py', 'pyproject.toml', 'README.md']:
        shutil.copy(ROOT/name, dest)
    shutil.copytree(ROOT/'nbs', dest/'nbs', ignore=shutil.ignore_patterns('.*', '_*'))
    (dest/'greedynasv2').mkdir()
    if (init := ROOT/'greedynasv2/__init__.py').exists():
        shutil.copy(init, dest/'greedynasv2')


def nbdev(command, cwd):
    "Run one nbdev `command` of the environment that runs this file."
    res = subprocess.run([Path(sys.executable).with_name(command)], cwd=cwd, capture_output=True, text=True)
    if res.returncode:
        sys.exit(f'{command} failed:\n{res.stdout}{res.stderr}')


def files(root):
    "Relative paths of notebooks, modules and pyproject.toml under `root`."
    found = [*root.glob('nbs/*.ipynb'), *root.glob('greedynasv2/**/*.py'), root/'pyproject.toml']
    return {f.relative_to(root) for f in found if not f.name.startswith('.')}


def sync_problems():
    "Sentences about notebooks that are not clean and library files that differ from a fresh export."
    with tempfile.TemporaryDirectory() as tmp:
        fresh = Path(tmp)
        copy_tree(fresh)
        nbdev('nbdev_clean', fresh)
        nbdev('nbdev_export', fresh)
        ours, theirs = files(ROOT), files(fresh)
        for f in sorted(ours - theirs):
            yield f'{f}: no notebook exports it. Delete it, or restore its notebook.'
        for f in sorted(theirs - ours):
            yield f'{f}: missing. Run `make sync`.'
        for f in sorted(ours & theirs):
            if (ROOT/f).read_bytes() == (fresh/f).read_bytes():
                continue
            yield f'{f}: {STALE[f.suffix]}. Run `make sync`.'


def notebook_problems(path):
    "Sentences about the size, the saved widget state and the parameters tag of one notebook."
    name, size = path.relative_to(ROOT), path.stat().st_size/1e6
    if size > MAX_MB:
        yield f'{name}: {size:.1f} MB, more than {MAX_MB} MB. Clear or thin its outputs.'
    nb = json.loads(path.read_text(encoding='utf-8'))
    if nb['metadata'].get('widgets'):
        yield f'{name}: holds saved widget state. Turn off Settings > Save Widget State Automatically, save it again.'
    tags = [tag for cell in nb['cells'] for tag in cell['metadata'].get('tags', [])]
    if any(path.match(pattern) for pattern in WITH_PARAMETERS) and tags.count('parameters') != 1:
        yield f'{name}: needs exactly one cell tagged `parameters`, or papermill would run its defaults without a word.'


def main():
    "Print every problem found; the exit code says whether there was one."
    notebooks = sorted((ROOT/'nbs').glob('*.ipynb'))
    problems = [*sync_problems(), *(p for nb in notebooks for p in notebook_problems(nb))]
    print('\n'.join(problems) or f'{len(notebooks)} notebooks clean, library in sync.')
    return bool(problems)


if __name__ == '__main__':
    sys.exit(main())
