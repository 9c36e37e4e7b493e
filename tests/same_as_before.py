"""Does another version compute the same? Compares events, tensors, scores and results of small jobs of two checkouts.

    .venv/bin/python tests/same_as_before.py /path/to/older/checkout [--out FOLDER] [job ...]

Runs that the older version left unfinished are finished by this one. Wording of warnings may differ, nothing else.
"""
import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent

TOY = dict(space='toy', epochs=6, warmup_epochs=2, round_every=1, q_epochs=4, q_end=.8, image_size=16, n_train=320,
           batch_size=16, lr=.03, m=190, n_valid=60, filter_dim=8, log_every=5, stop_rule='none', device='cpu')
MBSE = dict(space='mbse', width=.25, image_size=32, n_train=256, batch_size=32, epochs=5, warmup_epochs=1,
            round_every=2, q_epochs=3, q_end=.8, m=150, n_valid=64, filter_dim=8, filter_iters=60, merge_threshold=.3,
            memory=2, log_every=4, stop_rule='none',
            device='cpu')
RUNS = dict(
    toy=dict(TOY, method='greedynasv2', memory=2, merge_threshold=.3),
    toy_carried=dict(TOY, method='greedynasv2', memory=1, stop_rule='guarded', beta=.5, min_rounds=2),
    toy_paper=dict(TOY, method='greedynasv2', filter_recipe='paper', filter_iters=60, m=100),
    toy_label=dict(TOY, method='greedynasv2', q_label=.5, merge_threshold=.3, max_merges=2),
    greedynas=dict(TOY, method='greedynas'),
    fairnas=dict(TOY, method='fairnas', epochs=3),
    spos=dict(TOY, method='spos', epochs=3),
    mbse=dict(MBSE, method='greedynasv2'))


def make(name, folder, **changes):
    "The config of a run."
    from greedynasv2.training import make_config
    return make_config('demo', **{**RUNS[name], 'run_dir': str(folder), **changes})


def train(name, folder, until='', save_every=60.):
    "Train; stop by control.json at half the steps, or die right after a checkpoint, if that is asked for."
    from greedynasv2.runs import Run, write_control
    from greedynasv2.training import train_supernet
    cfg = make(name, folder, save_every=0. if until == 'killed' else save_every)
    half = cfg.epochs * (cfg.n_train // cfg.batch_size) // 2
    log, save, asked = Run.log, Run.save, []

    def log_and_stop(self, kind, **fields):
        log(self, kind, **fields)
        if until == 'stopped' and kind == 'step' and fields['step'] >= half and not asked:
            asked.append(write_control(self.folder, stop=True))

    def save_and_die(self, step, *args):
        save(self, step, *args)
        if until == 'killed' and step >= half:
            os._exit(9)

    Run.log, Run.save = log_and_stop, save_and_die
    return train_supernet(cfg, report=None)


def search(folder):
    "Search a run; its history."
    from greedynasv2.nsga2 import SearchConfig, search_run
    found = search_run(folder, SearchConfig(n_evals=40, pop_size=10, n_valid=60, n_calibration=32, device='cpu'),
                       report=None)
    return dict(history=found.history.to_dict('list'), best=found.best.tolist(), counts=found.gate.counts)


def retrain(folder, out):
    "Train the network that was found, with first weights of the supernet, and export it."
    try:
        import greedynasv2.retraining as module
    except ImportError:
        import greedynasv2.retrain as module
    cfg = module.retrain_config('demo', arch=str(folder/'search'), inherit=str(folder), epochs=2, n_train=96,
                                batch_size=16,
                                run_dir=str(out), device='cpu')
    run = module.retrain(cfg, report=None)
    module.export_network(run, onnx=False, report=None)


def detect(out):
    "A detector on drawn shapes."
    import greedynasv2.detection as module
    make_config = getattr(module, 'detection_config', None) or module.make_config
    cfg = make_config('demo', n_train=16, n_valid=8, epochs=1, network='', run_dir=str(out), device='cpu')
    module.train_detector(cfg, report=None)


def ranks():
    "Algorithm 1 on NAS-Bench-Macro, if that is here."
    from greedynasv2 import training
    from greedynasv2.core import InputError
    simulate = getattr(training, 'simulated_ranks', None) or training.simulate
    cfg = training.make_config('paper_mobile', space='nasbench_macro', epochs=12, round_every=2, m=200, filter_dim=8,
                               filter_iters=60)
    try:
        return simulate(cfg, paths_per_epoch=30).to_dict('list')
    except InputError as e:
        return str(e)


def scores(folder):
    "An evaluator's scores of paths of a trained supernet."
    from greedynasv2.core import generator
    from greedynasv2.nsga2 import run_evaluator
    evaluate = run_evaluator(Run_open(folder), n_valid=40, n_calibration=16, device='cpu')
    found = evaluate(evaluate.space.sample(12, generator(3)))
    return dict(loss=found.loss.tolist(), acc=found.acc.tolist())


def Run_open(folder):
    from greedynasv2.runs import Run
    return Run.open(folder)


def job(name, out):
    "One job in this process; what it found goes to `out`/NAME.json."
    out, (what, *rest) = Path(out), name.split(':')
    if what == 'run':
        train(rest[0], out/rest[0])
    if what in ('stopped', 'killed'):
        train(rest[0], out/f'{rest[0]}-{what}', until=what)
    if what == 'resume':
        train(rest[0], out/f'{rest[0]}-{rest[1]}')
    if what == 'retrain':
        retrain(out/rest[0], out/f'{rest[0]}-network')
    if what == 'detect':
        detect(out/'detector')
    found = None
    if what == 'search':
        found = search(out/rest[0])
    if what == 'scores':
        found = scores(out/rest[0])
    if what == 'ranks':
        found = ranks()
    (out/f'{name.replace(":", "-")}.json').write_text(json.dumps(found))


def run_jobs(checkout, out, names):
    "Run jobs one after the other with the library of `checkout`; those done before are not repeated."
    for name in names:
        done = out/f'{name.replace(":", "-")}.json'
        if done.exists():
            continue
        env = {**os.environ, 'PYTHONPATH': str(checkout), 'OMP_NUM_THREADS': '1'}
        code = subprocess.run([sys.executable, __file__, '--job', name, '--out', str(out)], env=env,
                              cwd=checkout).returncode
        if code == 9:
            done.write_text('null')
        elif code:
            sys.exit(f'{name} failed with {checkout}')


def same(a, b):
    "Equal, where NaN equals NaN."
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


def differences(a, b):
    "Sentences on what differs between two run folders: events, newest checkpoint, results; how much was compared."
    import torch

    from greedynasv2.runs import Run, same_events
    a, b = Run.open(a), Run.open(b)
    found = [d for d in same_events(a, b, at_most=10**6) if '(warning): message is' not in d]
    (step_a, tensors_a, _), (step_b, tensors_b, _) = a.checkpoint(), b.checkpoint()
    if step_a != step_b:
        found.append(f'step {step_a} against {step_b}')
    if tensors_a.keys() != tensors_b.keys():
        found.append(f'tensors {sorted(tensors_a.keys() ^ tensors_b.keys())}')
    found += [f'tensor {k}' for k in tensors_a if k in tensors_b and not torch.equal(tensors_a[k], tensors_b[k])]
    if a.results != b.results:
        found.append(f'results {a.results} against {b.results}')
    return found, f'{len(a.events())} events, {len(tensors_a)} tensors'


def compare(before, after, chosen):
    "Compare what both have left; the number of differences."
    bad = 0
    def tell(what, found, n=''):
        nonlocal bad
        bad += len(found)
        print(f'{"differs" if found else "same   "}  {what}  {n}', *found[:8], sep='\n           ' if found else '',
              flush=True)
    for name in chosen:
        tell(f'{name}: whole run', *differences(before/name, after/name))
        for how in ('stopped', 'killed'):
            tell(f'{name}: {how}, then resumed', *differences(before/name, after/f'{name}-{how}'))
            tell(f'{name}: {how} by the older version, resumed by this one',
                 *differences(before/name, after/f'{name}-{how}-old'))
    for folder in ('toy-network', 'mbse-network', 'detector'):
        if (before/folder).exists() and (after/folder).exists():
            tell(folder, *differences(before/folder, after/folder))
    for folder in ('toy-network', 'mbse-network'):
        files = [Path(folder)/'network'/n for n in ('weights.safetensors',)]
        for f in files:
            if (before/f).exists():
                tell(str(f), [] if (before/f).read_bytes() == (after/f).read_bytes() else ['bytes'])
    for file in sorted(before.glob('*.json')):
        a, b = json.loads(file.read_text()), json.loads((after/file.name).read_text())
        if a is not None:
            tell(file.stem, [] if same(a, b) else [f'{a!s:.200} against {b!s:.200}'], f'{len(str(a))} characters')
    return bad


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('before', nargs='?')
    parser.add_argument('runs', nargs='*', help=f'some of {", ".join(RUNS)}; default all')
    parser.add_argument('--out', default='')
    parser.add_argument('--job', default='')
    parser.add_argument('--only', choices=['before', 'after', 'compare'], default='')
    args = parser.parse_args()
    if args.job:
        return job(args.job, args.out)
    out = Path(args.out or tempfile.mkdtemp(prefix='same-')).absolute()
    before, after, chosen = out/'before', out/'after', args.runs or list(RUNS)
    for folder in (before, after):
        folder.mkdir(parents=True, exist_ok=True)
    whole = [f'run:{name}' for name in chosen]
    cut = [f'{how}:{name}' for name in chosen for how in ('stopped', 'killed')]
    spaces = [name for name in ('toy', 'mbse') if name in chosen]
    rest = [f'{what}:{name}' for name in spaces for what in ('scores', 'search', 'retrain')] + ['ranks', 'detect']
    if args.only in ('', 'before'):
        run_jobs(args.before, before, whole + cut + rest)
    if args.only in ('', 'after'):
        import shutil
        run_jobs(HERE, after, whole + cut)
        for name in chosen:
            for how in ('stopped', 'killed'):
                if not (after/f'{name}-{how}-old').exists():
                    shutil.copytree(before/f'{name}-{how}', after/f'{name}-{how}-old')
        hows = 'stopped', 'stopped-old', 'killed', 'killed-old'
        resumed = [f'resume:{name}:{how}' for name in chosen for how in hows]
        run_jobs(HERE, after, resumed + rest)
    if args.only == 'before':
        return
    n = compare(before, after, chosen)
    print(f'{n} differences; runs kept in {out}')
    sys.exit(bool(n))


if __name__ == '__main__':
    main()
