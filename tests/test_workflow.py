"The workflow for GitHub installs and calls `make test`: its steps, executed with make's own dry run."
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = ROOT/'.github/workflows/test.yml'
SKIP = shutil.ignore_patterns('.git', '.venv', 'runs', 'results', 'img', '__pycache__', '.ipynb_checkpoints')


def steps():
    "The steps of the only job, in their order."
    jobs = yaml.safe_load(WORKFLOW.read_text(encoding='utf-8'))['jobs']
    return next(iter(jobs.values()))['steps']


@pytest.fixture
def run_step(tmp_path):
    """A function that runs a step as GitHub does, by `bash -e` in a fresh checkout, and gives what it printed. make and
    sudo only say what they would do: run for real, `make test` would call itself without end."""
    checkout, programs = tmp_path/'checkout', tmp_path/'programs'
    shutil.copytree(ROOT, checkout, ignore=SKIP)
    programs.mkdir()
    for name in 'sudo', 'google-chrome':
        (programs/name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (programs/name).chmod(0o755)
    for name in 'bash', 'make', 'python3', 'sh', 'sed', 'expand', 'test', 'echo':
        (programs/name).symlink_to(shutil.which(name))
    env = {'PATH': str(programs), 'MAKEFLAGS': 'n', 'HOME': str(tmp_path), 'TMPDIR': str(tmp_path)}

    def run(command):
        res = subprocess.run(['bash', '-e', '-c', command], cwd=checkout, env=env, capture_output=True, text=True)
        assert res.returncode == 0, res.stderr
        assert set(os.listdir(checkout)) == before, 'a dry run has written something'
        return res.stdout

    before = set(os.listdir(checkout))
    return run


def test_workflow_installs_and_tests(run_step):
    "Python first, then our own install, then all parts of `make test`."
    used = [step['uses'].split('@')[0] for step in steps() if 'uses' in step]
    assert used == ['actions/checkout', 'actions/setup-python']
    browser, install, test = (run_step(step['run']) for step in steps() if 'run' in step)
    assert browser.startswith('sudo ln -s /') and browser.split()[3].endswith('google-chrome')
    assert '-m venv .venv' in install and "-c constraints.txt --no-build-isolation -e '.[dev]'" in install
    asked = [line for line in test.splitlines() if line.startswith(('.venv/bin/', 'OMP_NUM_THREADS'))]
    for part in 'ruff check', 'tests/check_tree.py', 'nbdev_test', 'pytest tests':
        assert any(part in line for line in asked), f'make test would not call {part}'


def test_python_is_the_one_we_support():
    "The workflow's Python is the lowest that settings.ini allows."
    from configparser import ConfigParser
    parser = ConfigParser()
    parser.read(ROOT/'settings.ini', encoding='utf-8')
    python, = (step['with']['python-version'] for step in steps() if 'python-version' in step.get('with', {}))
    assert python == parser['DEFAULT']['min_python']
