"""The long acceptance runs of training: whole demo runs through papermill, and one run that is killed ten times.

What they measure goes to results/training.json. `make accept` calls this. A part alone: python tests/accept.py demos
mbse
"""
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/'tests'))

from conftest import start_run
from greedynasv2.core import find_data, write_atomic
from greedynasv2.runs import Run, same_events
from greedynasv2_studies.measuring import results_file
from test_training import killed_until_done, same_weights, toy, weights


def cifar_folder(folder, n_train=200, n_test=20):
    "A part of CIFAR-10 as an image folder: so many images of each class."
    counts = Counter()
    with tarfile.open(find_data('cifar10_imagefolder.tar.gz')) as archive:
        for member in archive:
            if not member.name.endswith('.jpg'):
                continue
            split, label, name = member.name.removeprefix('./').split('/')
            counts[split, label] += 1
            if counts[split, label] > (n_train if split == 'train' else n_test):
                continue
            path = Path(folder)/split/label/name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.extractfile(member).read())
    return str(folder)


def demo(name, folder, **parameters):
    "One run of nbs/train_supernet.ipynb by papermill: what its events say."
    run_dir = Path(folder)/name
    given = [a for k, v in dict(parameters, run_dir=run_dir).items() for a in ('-p', k, str(v))]
    papermill = Path(sys.executable).with_name('papermill')
    began, out = time.time(), Path(folder)/f'{name}.ipynb'
    subprocess.run([papermill, '--no-progress-bar', ROOT/'nbs/train_supernet.ipynb', out, *given], check=True,
                   capture_output=True)
    run, minutes = Run.open(run_dir), (time.time() - began) / 60
    rounds, steps = run.events('round'), run.events('step')
    columns = ['epoch', 'q', 'kept', 'u', 'kappa', 'merged', 'ops', 'verdict']
    tenth = max(1, len(steps) // 10)
    table = rounds.reindex(columns=columns).round(3).astype(object)
    row = dict(name=name, parameters=parameters, minutes=round(minutes, 2), status=run.status,
               steps=int(steps.step.max()), loss_first_tenth=round(steps.loss[:tenth].mean(), 3),
               loss_last_tenth=round(steps.loss[-tenth:].mean(), 3),
               rounds=table.where(table.notna(), None).to_dict('records'),
               acceptance=run.events('accept')[['epoch', 'rate']].round(4).to_dict('list'),
               merges=int((run.events('merge').get('decision') == 'merge').sum()) if len(run.events('merge')) else 0,
               compared=run.results['compared'], notebook_mb=round(out.stat().st_size / 1e6, 2))
    print(json.dumps({k: v for k, v in row.items() if k not in ('acceptance',)}), flush=True)
    return row


def complaints(row):
    "Sentences about what a demo run does not show, minutes aside: those depend on the machine."
    if row['status'] != 'ended':
        yield f'it is {row["status"]}'
    if len(row['rounds']) < 4:
        yield f'it had {len(row["rounds"])} rounds'
    if row['loss_last_tenth'] > .8 * row['loss_first_tenth']:
        yield 'its loss hardly fell'
    if row['notebook_mb'] > 3:
        yield f'its notebook has {row["notebook_mb"]} MB'
    if all(r['verdict'] for r in row['rounds']):
        yield 'no round gave a filter to be trusted'


def demos(folder, *names):
    "The demo runs of the training issue."
    wanted = dict(mbse=dict(space='mbse'), mbse_mix_shuffle=dict(space='mbse_mix_shuffle'),
                  res50se=dict(space='res50se'))
    if find_data('cifar10_imagefolder.tar.gz'):
        wanted['nasbench_macro'] = dict(space='nasbench_macro', recipe='demo', data=cifar_folder(Path(folder)/'cifar'))
    else:
        print('nasbench_macro is passed by: cifar10_imagefolder.tar.gz is not on this machine.')
    return [demo(n, folder, **p) for n, p in wanted.items() if not names or n in names]


def kills(folder, n=10, seed=0):
    "One run killed `n` times at random moments, against one that was left alone."
    big, began = dict(epochs=24, q_epochs=22, n_train=960, save_every=0.), time.time()
    assert start_run(toy(Path(folder)/'whole', **big)).wait() == 0
    began_steps, seconds = Run.open(Path(folder)/'whole').events('start').t.iloc[0] - began, time.time() - began
    # A life, beyond its start, of which n are not enough to end the run
    part = (seconds - began_steps) / n
    wait = began_steps + .3 * part, began_steps + 1.2 * part
    n_kills = killed_until_done(toy(Path(folder)/'killed', **big), n, wait, random.Random(seed))
    whole, killed = Run.open(Path(folder)/'whole'), Run.open(Path(folder)/'killed')
    lines = (killed.folder/'events.jsonl').read_text().splitlines()
    resumed = [json.loads(line)['step'] for line in lines if '"resume"' in line]
    row = dict(kills=n_kills, resumed_from=resumed, steps=int(whole.events('step').step.max()),
               differences_in_events=same_events(whole, killed),
               tensors_equal=same_weights(weights(whole), weights(killed)))
    print(json.dumps(row), flush=True)
    same = row['tensors_equal'] and not row['differences_in_events']
    assert n_kills == n and same, 'a killed run did not end as the other'
    steps = {step for step in resumed if step}
    assert len(steps) >= n // 2, f'killed before its first checkpoint too often to show anything: {resumed}'
    return row


if __name__ == '__main__':
    parts = sys.argv[1:2] or ['demos', 'kills']
    out = results_file('training.json')
    result = json.loads(out.read_text()) if out.exists() else dict(what='whole runs of train_supernet', demos=[])
    with tempfile.TemporaryDirectory() as folder:
        if 'demos' in parts:
            new = demos(folder, *sys.argv[2:])
            result['demos'] = [r for r in result['demos'] if r['name'] not in {n['name'] for n in new}] + new
        if 'kills' in parts:
            result['kills'] = kills(folder)
    result['machine'] = dict(cores=os.cpu_count())
    write_atomic(out, json.dumps(result, indent=1) + '\n')
    print('Written to', out)
    said = {r['name']: list(complaints(r)) for r in result['demos']}
    if any(said.values()):
        sys.exit(f'Not as they should be: { {k: v for k, v in said.items() if v} }')
