"What all tests share: the marker `slow`, data files that a machine may lack, and runs that are stopped or killed."
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT/'nbs', ROOT/'studies/nbs'
# Before torch is imported: runs repeat bit for bit at an equal number of threads only
os.environ.setdefault('OMP_NUM_THREADS', '1')

import pytest


def pytest_configure(config):
    "Register the markers, so that `-m 'not slow'` is known everywhere."
    config.addinivalue_line('markers', 'slow: takes more than some seconds; `make test` runs it, `make check` does not')


@pytest.fixture
def data_file():
    "A function that finds a data file by name, or skips the test with a sentence that says how to get it."
    from greedynasv2.core import cache_dir, find_data

    def find(name, source=''):
        if path := find_data(name):
            return path
        pytest.skip(f'{name} is not on this machine. Put it{source and f" (from {source})"} into {cache_dir()}, '
                    'or into a folder of your own and name that folder in GREEDYNASV2_DATA.')
    return find


ENTRIES = dict(TrainConfig='train_supernet', RetrainConfig='retrain', DetectionConfig='train_detector')


def start_run(cfg, first=''):
    "Train in a process of its own; `first` is code that runs before."
    config, module = type(cfg).__name__, type(cfg).__module__
    code = (f'import sys, json; {first}\n'
            f'from {module} import {config}, {ENTRIES[config]}\n'
            f'{ENTRIES[config]}({config}(**json.loads(sys.argv[1])))')
    return subprocess.Popen([sys.executable, '-c', code, json.dumps(cfg.to_dict())], stdout=subprocess.DEVNULL,
                            stderr=subprocess.PIPE, text=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})


@pytest.fixture
def start():
    "`start_run`: trains in a process of its own."
    return start_run


@pytest.fixture
def stop_at():
    "A function that lets a loop ask itself to stop, by control.json, after a step: `stop_at(trainer, 7)`."
    def stop_at(trainer, last):
        from greedynasv2.runs import write_control
        train_step = trainer.train_step
        def step_and_ask(*batch):
            train_step(*batch)
            if trainer.step == last:
                write_control(trainer.run.folder, stop=True)
        trainer.train_step = step_and_ask
        return trainer
    return stop_at


def until(true, seconds, what):
    "Wait until `true()`."
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f'{what}: not within {seconds} s'
        time.sleep(.2)


def run_notebook(name, out, parameters=None, seconds=600):
    """Run `name`.ipynb of the library or the studies by papermill. Its client has been seen to miss a kernel's reply
    and wait for ever, so a notebook with a cell that takes longer than `seconds` is run once more."""
    import papermill
    from nbclient.exceptions import CellTimeoutError
    notebook = next(f for folder in NOTEBOOKS if (f := folder/f'{name}.ipynb').exists())
    def run():
        return papermill.execute_notebook(notebook, out, parameters, progress_bar=False, execution_timeout=seconds)
    try:
        return run()
    except CellTimeoutError:
        return run()
