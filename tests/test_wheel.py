"The wheel holds the whole library, works without the source tree, and declares all that it imports."
import ast
import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from email import message_from_bytes
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent

IMPORT_ALL = '''
import importlib, json, pkgutil, greedynasv2
names = [m.name for m in pkgutil.walk_packages(greedynasv2.__path__, 'greedynasv2.')]
print(json.dumps({name: importlib.import_module(name).__file__ for name in ['greedynasv2', *names]}))
'''


def run(*args, cwd):
    "Run a command quietly; its output is the message when it fails."
    res = subprocess.run([str(a) for a in args], cwd=cwd, capture_output=True, text=True)
    assert res.returncode == 0, f'{args}\n{res.stdout}{res.stderr}'
    return res.stdout


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    "The wheel, built offline by way of the source distribution, from a copy of what a build needs."
    src, out = tmp_path_factory.mktemp('src'), tmp_path_factory.mktemp('dist')
    for name in ['settings.ini', 'setup.py', 'pyproject.toml', 'README.md', 'LICENSE']:
        shutil.copy(ROOT/name, src)
    for name in ['greedynasv2', 'studies']:      # the studies are there, and must stay out
        shutil.copytree(ROOT/name, src/name, ignore=shutil.ignore_patterns('__pycache__', '*.egg-info'))
    run(sys.executable, '-m', 'build', '--no-isolation', '--outdir', out, src, cwd=out)
    return next(out.glob('*.whl'))


@pytest.fixture(scope='module')
def clean_python(wheel, tmp_path_factory):
    "The Python of a new environment with only the wheel in it; other packages are borrowed from this environment."
    env = tmp_path_factory.mktemp('env')
    venv.create(env, symlinks=True)
    python = env/'bin/python'
    run(sys.executable, '-m', 'pip', '--python', python, 'install', '--no-deps', '--no-index', wheel, cwd=env)
    site = Path(run(python, '-c', 'import sysconfig; print(sysconfig.get_path("purelib"))', cwd=env).strip())
    # Python reads no .pth file of a folder that a .pth file names, so our own editable install stays out
    borrowed = {sysconfig.get_path('purelib'), sysconfig.get_path('platlib')}
    (site/'borrowed.pth').write_text('\n'.join(sorted(borrowed)) + '\n')
    return python


def third_party_imports():
    "Top-level names that the library imports, also inside functions, and that Python does not bring along."
    names = set()
    for path in (ROOT/'greedynasv2').rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.Import):
                names |= {a.name.split('.')[0] for a in node.names}
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module.split('.')[0])
    return names - set(sys.stdlib_module_names) - {'greedynasv2'}


def metadata(wheel):
    "What the wheel says of itself."
    with ZipFile(wheel) as z:
        name = next(n for n in z.namelist() if n.endswith('.dist-info/METADATA'))
        return message_from_bytes(z.read(name))


def declared(wheel):
    "Distributions that the wheel requires, the extras of users included, that of developers not."
    requires = [Requirement(r) for r in metadata(wheel).get_all('Requires-Dist')]
    return {canonicalize_name(r.name) for r in requires if 'extra == "dev"' not in str(r.marker)}


def test_wheel_holds_only_the_library(wheel):
    "No notebooks, no tests, no studies, nothing else at the top level."
    tops = {name.split('/')[0] for name in ZipFile(wheel).namelist()}
    assert {t for t in tops if not t.endswith('.dist-info')} == {'greedynasv2'}


def test_wheel_names_the_paper(wheel):
    "The paper's address, and classifiers from settings.ini as well as those of setup.py."
    said = metadata(wheel)
    assert said.get_all('Project-URL') == ['Paper, https://arxiv.org/abs/2111.12609']
    assert {'Framework :: Jupyter', 'Programming Language :: Python :: 3.11'} <= set(said.get_all('Classifier'))


def test_every_module_imports_without_the_source(clean_python, tmp_path):
    "Each module comes from the clean environment, and there is one for each file of the library."
    files = json.loads(run(clean_python, '-I', '-c', IMPORT_ALL, cwd=tmp_path).splitlines()[-1])
    assert len(files) == len(list((ROOT/'greedynasv2').rglob('*.py'))) > 1
    elsewhere = {name: f for name, f in files.items() if not Path(f).is_relative_to(clean_python.parent.parent)}
    assert not elsewhere


def test_every_import_is_declared(wheel):
    "What the library imports stands in settings.ini, so that a plain install is complete."
    owners, known = packages_distributions(), declared(wheel)
    missing = {name for name in third_party_imports()
               if not known & {canonicalize_name(d) for d in owners.get(name, [name])}}
    assert not missing, f'imported, but not among the requirements in settings.ini: {sorted(missing)}'


def test_studies_install_next_to_the_library(clean_python, tmp_path):
    "As `make` does it: editable, without dependencies; every module is found outside of the checkout."
    shutil.copytree(ROOT/'studies', tmp_path/'studies', ignore=shutil.ignore_patterns('__pycache__', '*.egg-info'))
    install = '--no-deps', '--no-index', '--no-build-isolation', '-e', './studies'
    # pip builds with the new environment's Python, which borrows setuptools from this one
    run(clean_python, '-m', 'pip', 'install', *install, cwd=tmp_path)
    modules = [f.stem for f in (ROOT/'studies/greedynasv2_studies').glob('[!_]*.py')]
    code = f'import importlib; [importlib.import_module("greedynasv2_studies." + name) for name in {modules}]'
    run(clean_python, '-I', '-c', code, cwd=tmp_path)
