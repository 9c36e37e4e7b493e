"""Does another version compute the same? Small jobs with two checkouts; events, tensors, scores and results compared.

    .venv/bin/python tests/same_as_before.py /path/to/older/checkout [run ...] [--out FOLDER]

Runs that the older version left unfinished are finished by this one. What may differ, and nothing else: the wording of
warnings, how the data of a detector is called in its first event, the names of a search's counts, and that methods
without a filter keep no untrained one in their checkpoints.
"""
import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent

TOY = dict(space='toy', epochs=6, warmup_epochs=2, round_every=1, q_epochs=4, q_end=.8, image_size=16, n_train=320,
           batch_size=16, lr=.03, m=190, n_valid=60, filter_dim=8, log_every=5, stop_rule='none', device='cpu')
MBSE = dict(space='mbse', width=.25, image_size=32, n_train=256, batch_size=32, epochs=5, warmup_epochs=1,
            round_every=2, q_epochs=3, q_end=.8, m=150, n_valid=64, filter_dim=8, filter_iters=60, merge_threshold=.3,
            memory=2, log_every=4, stop_rule='none', device='cpu')
RUNS = dict(
    toy=dict(TOY, method='greedynasv2', memory=2, merge_threshold=.3),
    toy_carried=dict(TOY, method='greedynasv2', memory=1, stop_rule='guarded', beta=.5, min_rounds=2),
    toy_paper=dict(TOY, method='greedynasv2', filter_recipe='paper', filter_iters=60, m=100),
    toy_label=dict(TOY, method='greedynasv2', q_label=.5, merge_threshold=.3, max_merges=2),
    greedynas=dict(TOY, method='greedynas'),
    fairnas=dict(TOY, method='fairnas', epochs=3),
    spos=dict(TOY, method='spos', epochs=3),
    mbse=dict(MBSE, method='greedynasv2'))
SEARCHED = 'toy', 'mbse'                 # runs whose supernets are searched, and what is found is retrained
WAYS_TO_STOP = 'stopped', 'killed'


def train(name, folder, until=''):
    "Train; stop by control.json at half the steps, or die right after a checkpoint, if that is asked for."
    from greedynasv2.runs import Run, write_control
    from greedynasv2.training import make_config, train_supernet
    cfg = make_config('demo', **RUNS[name], run_dir=str(folder), save_every=0. if until == 'killed' else 60.)
    half = cfg.epochs * (cfg.n_train // cfg.batch_size) // 2
    log, save = Run.log, Run.save
    asked = []

    def log_and_stop(self, kind, **fields):
        log(self, kind, **fields)
        if until == 'stopped' and kind == 'step' and fields['step'] >= half and not asked:
            asked.append(write_control(self.folder, stop=True))

    def save_and_die(self, step, *args):
        save(self, step, *args)
        if until == 'killed' and step >= half:
            os._exit(9)

    Run.log = log_and_stop
    Run.save = save_and_die
    train_supernet(cfg, report=None)


def search(folder):
    "Search a run: all evaluations, the best path, and what became of the paths that were made."
    from greedynasv2.nsga2 import SearchConfig, search_run
    cfg = SearchConfig(n_evals=40, pop_size=10, n_valid=60, n_calibration=32, device='cpu')
    found = search_run(folder, cfg, report=None)
    counts = list(found.gate.counts.values())
    return dict(history=found.history.to_dict('list'), best=found.best.tolist(), counts=counts)


def scores(folder):
    "An evaluator's scores of paths of a trained supernet."
    from greedynasv2.core import generator
    from greedynasv2.nsga2 import run_evaluator
    from greedynasv2.runs import Run
    evaluate = run_evaluator(Run.open(folder), n_valid=40, n_calibration=16, device='cpu')
    found = evaluate(evaluate.space.sample(12, generator(3)))
    return dict(loss=found.loss.tolist(), acc=found.acc.tolist())


def retrain(folder, out):
    "Train the network that was found, with first weights of the supernet, and export it."
    try:
        import greedynasv2.retraining as module
    except ImportError:
        import greedynasv2.retrain as module
    cfg = module.retrain_config('demo', arch=str(folder/'search'), inherit=str(folder), epochs=2, n_train=96,
                                batch_size=16, run_dir=str(out), device='cpu')
    module.export_network(module.retrain(cfg, report=None), onnx=False, report=None)


def detect(out):
    "Train a detector on drawn shapes."
    import greedynasv2.detection as module
    make_config = getattr(module, 'detection_config', None) or module.make_config
    cfg = make_config('demo', n_train=16, n_valid=8, epochs=1, network='', run_dir=str(out), device='cpu')
    module.train_detector(cfg, report=None)


def ranks():
    "Algorithm 1 on NAS-Bench-Macro, if that is here: the rank of the paths it would train."
    from greedynasv2 import training
    from greedynasv2.core import InputError
    try:
        from greedynasv2_studies.macro import simulated_ranks
    except ImportError:
        simulated_ranks = getattr(training, 'simulated_ranks', None) or training.simulate
    cfg = training.make_config('paper_mobile', space='nasbench_macro', epochs=12, round_every=2, m=200, filter_dim=8,
                               filter_iters=60)
    try:
        return simulated_ranks(cfg, paths_per_epoch=30).to_dict('list')
    except InputError as e:
        return str(e)


def job(name, out):
    "One job in this process; what it found goes to `out`/NAME.json."
    what, *rest = name.split(':')
    found = None
    match what:
        case 'run':
            train(rest[0], out/rest[0])
        case 'stopped' | 'killed':
            train(rest[0], out/f'{rest[0]}-{what}', until=what)
        case 'resume':
            train(rest[0], out/f'{rest[0]}-{rest[1]}')
        case 'scores':
            found = scores(out/rest[0])
        case 'search':
            found = search(out/rest[0])
        case 'retrain':
            retrain(out/rest[0], out/f'{rest[0]}-network')
        case 'ranks':
            found = ranks()
        case 'detect':
            detect(out/'detector')
    result_file(out, name).write_text(json.dumps(found))


def result_file(out, name): return out/f'{name.replace(":", "-")}.json'


def run_jobs(checkout, out, names):
    "Run jobs one after the other with the library of `checkout`; those done before are not repeated."
    for name in names:
        if result_file(out, name).exists():
            continue
        env = {**os.environ, 'PYTHONPATH': f'{checkout}{os.pathsep}{checkout}/studies', 'OMP_NUM_THREADS': '1'}
        command = [sys.executable, __file__, '--job', name, '--out', str(out)]
        code = subprocess.run(command, env=env, cwd=checkout).returncode
        if code == 9:
            result_file(out, name).write_text('null')
        elif code:
            sys.exit(f'{name} failed with {checkout}')


def same(a, b):
    "Equal, where NaN equals NaN."
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return a == b


def comparable(run):
    "The events that count, without times, places and wording; a request to stop is no part of what is computed."
    from greedynasv2.runs import SPEED, WHERE
    rows = []
    for row in run.events().to_dict('records'):
        aside = {k for k, v in row.items() if v is None or v != v or SPEED.fullmatch(k)}
        if row['kind'] == 'start':
            aside |= {*WHERE, 'data'}
        if row['kind'] == 'warning':
            aside.add('message')
        if row['kind'] not in ('resume', 'control'):
            rows.append({k: v for k, v in row.items() if k not in aside})
    return rows


def event_differences(a, b):
    "Sentences about what differs between the events of two runs."
    rows_a, rows_b = comparable(a), comparable(b)
    found = []
    if len(rows_a) != len(rows_b):
        found.append(f'{len(rows_a)} events against {len(rows_b)}')
    for i, (x, y) in enumerate(zip(rows_a, rows_b, strict=False)):
        for k in {**x, **y}:
            if not same(x.get(k), y.get(k)):
                found.append(f'event {i} ({x["kind"]}): {k} is {x.get(k)!r:.60} against {y.get(k)!r:.60}')
    return found


def differences(a, b):
    "Sentences about what differs between two run folders, and how much was compared."
    import torch

    from greedynasv2.runs import Run
    a, b = Run.open(a), Run.open(b)
    step_a, tensors_a, meta_a = a.checkpoint()
    step_b, tensors_b, _ = b.checkpoint()
    if meta_a.get('filter', {}).get('rounds') == 0:          # an untrained filter where none is asked for
        tensors_a = {k: v for k, v in tensors_a.items() if not k.startswith('filter.') or k in tensors_b}
    found = event_differences(a, b)
    if step_a != step_b:
        found.append(f'step {step_a} against {step_b}')
    if tensors_a.keys() != tensors_b.keys():
        found.append(f'tensors {sorted(tensors_a.keys() ^ tensors_b.keys())}')
    for k in tensors_a.keys() & tensors_b.keys():
        if not torch.equal(tensors_a[k], tensors_b[k]):
            found.append(f'tensor {k}')
    if a.results != b.results:
        found.append(f'results {a.results} against {b.results}')
    return found, f'{len(a.events())} events, {len(tensors_a)} tensors'


def result_differences(file_a, file_b):
    "What differs between what two jobs have returned, and how much was compared."
    a, b = json.loads(file_a.read_text()), json.loads(file_b.read_text())
    for found in (a, b):                                     # older versions of this script wrote counts by name
        if isinstance(found, dict) and isinstance(found.get('counts'), dict):
            found['counts'] = list(found['counts'].values())
    return [] if same(a, b) else [f'{a!s:.200} against {b!s:.200}'], f'{len(str(a))} characters'


def compare(before, after, chosen):
    "Compare what both have left; the number of differences."
    pairs = []
    for name in chosen:
        pairs.append((f'{name}: whole run', before/name, after/name))
        for how in WAYS_TO_STOP:
            pairs.append((f'{name}: {how}, then resumed', before/name, after/f'{name}-{how}'))
            pairs.append((f'{name}: {how} by the older version, then resumed', before/name, after/f'{name}-{how}-old'))
    pairs += [(name, before/name, after/name) for name in (*(f'{run}-network' for run in SEARCHED), 'detector')]
    found = [(what, *differences(a, b)) for what, a, b in pairs if a.exists() and b.exists()]
    for run in SEARCHED:
        a, b = (folder/f'{run}-network'/'network'/'weights.safetensors' for folder in (before, after))
        if a.exists() and b.exists():
            equal = a.read_bytes() == b.read_bytes()
            found.append((f'exported weights of {run}', [] if equal else ['bytes differ'], f'{a.stat().st_size} bytes'))
    for file in sorted(before.glob('*.json')):
        if file.read_text() != 'null' and (after/file.name).exists():
            found.append((file.stem, *result_differences(file, after/file.name)))
    for what, problems, compared in found:
        print('differs' if problems else 'same   ', what, f'({compared})', *problems[:8], sep='  ', flush=True)
    return sum(len(problems) for _, problems, _ in found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('before', nargs='?', help='the older checkout')
    parser.add_argument('runs', nargs='*', help=f'some of {", ".join(RUNS)}; default all')
    parser.add_argument('--out', default='', help='folder for the runs; those that are there are not repeated')
    parser.add_argument('--only', choices=['before', 'after', 'compare'], default='')
    parser.add_argument('--job', default='', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        return job(args.job, Path(args.out))
    out = Path(args.out or tempfile.mkdtemp(prefix='same-')).absolute()
    before, after = out/'before', out/'after'
    for folder in (before, after):
        folder.mkdir(parents=True, exist_ok=True)
    chosen = args.runs or list(RUNS)
    cuts = [(name, how) for name in chosen for how in WAYS_TO_STOP]
    first = [f'run:{name}' for name in chosen] + [f'{how}:{name}' for name, how in cuts]
    last = [f'{what}:{name}' for name in SEARCHED if name in chosen for what in ('scores', 'search', 'retrain')]
    last += ['ranks', 'detect']
    if args.only in ('', 'before'):
        run_jobs(args.before, before, first + last)
    if args.only in ('', 'after'):
        run_jobs(HERE, after, first)
        for name, how in cuts:
            if not (after/f'{name}-{how}-old').exists():
                shutil.copytree(before/f'{name}-{how}', after/f'{name}-{how}-old')
        run_jobs(HERE, after, [f'resume:{name}:{how}{by}' for name, how in cuts for by in ('', '-old')] + last)
    if args.only in ('', 'compare'):
        n = compare(before, after, chosen)
        print(f'{n} differences; runs kept in {out}')
        sys.exit(bool(n))


if __name__ == '__main__':
    main()
