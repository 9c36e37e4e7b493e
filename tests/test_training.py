"Algorithm 1 does what it says, survives what may happen to it, and goes on exactly where it was."
import json
import random
import signal
import subprocess
import time

import pandas as pd
import pytest
import torch

from conftest import start_run
from greedynasv2.algorithm import (
    Algorithm1,
    Skill,
    agreement,
    check_share,
    check_skill,
    is_round,
    may_stop,
    parts_of,
    simulate,
)
from greedynasv2.blocks import MBConv
from greedynasv2.core import InputError, Scores
from greedynasv2.nasbench import macro_evaluator
from greedynasv2.runs import Run, same_events, write_control
from greedynasv2.spaces import get_space
from greedynasv2.supernet import batch_norms
from greedynasv2.training import ABSENT, SupernetTrainer, TrainConfig, make_config, read_config, train_supernet
from greedynasv2.vpu import FILTERS, FilterConfig, Labels

TOY = dict(space='toy', epochs=6, warmup_epochs=2, round_every=1, q_epochs=4, q_end=.8, image_size=16, n_train=320,
           batch_size=16, lr=.03, m=190, n_valid=60, filter_dim=8, log_every=5, stop_rule='none')


def toy(folder, **changes):
    "A run of seconds."
    return make_config('demo', **{**TOY, 'run_dir': str(folder), **changes})


def weights(run):
    "All tensors of the last checkpoint."
    return run.checkpoint()[1]


def same_weights(a, b): return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def killed_until_done(cfg, n_kills, wait, rng):
    "Start the run again and again, each time killed at a random moment, until it is left alone; how often it was killed."
    kills = 0
    for attempt in range(n_kills + 1):
        process = start_run(cfg)
        if attempt < n_kills:
            try:
                process.wait(rng.uniform(*wait))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                kills += 1
        stderr = process.communicate()[1]
        assert process.returncode in (0, -signal.SIGKILL), stderr
        if process.returncode == 0:
            return kills
    raise AssertionError('the last start was not left alone')


@pytest.mark.slow
def test_killed_runs_end_as_if_nothing_had_happened(tmp_path, start):
    "SIGKILL at random moments: same events, same tensors, bit for bit."
    began = time.monotonic()
    assert start(toy(tmp_path/'whole', memory=2)).wait() == 0
    took = time.monotonic() - began                                # some machines are many times as fast as others
    assert killed_until_done(toy(tmp_path/'killed', memory=2, save_every=0.), 3, (.3*took, .7*took), random.Random(0))
    whole, killed = Run.open(tmp_path/'whole'), Run.open(tmp_path/'killed')
    assert same_events(whole, killed) == []
    assert same_weights(weights(whole), weights(killed))
    assert whole.results == killed.results


@pytest.mark.parametrize('method', ['spos', 'fairnas', 'greedynas', 'greedynasv2'])
def test_every_method_is_one_parameter_away(tmp_path, method):
    "All four end, and train the paths that they are known for."
    run = train_supernet(toy(tmp_path/'run', method=method, epochs=3, warmup_epochs=1, n_train=96), report=None)
    steps = run.events('step')
    assert run.status == 'ended' and steps.step.iloc[-1] == 18
    assert len(run.events('round')) == (2 if method in ('greedynas', 'greedynasv2') else 0)
    paths = sum(steps.paths, [])
    if method == 'fairnas':
        assert all(sorted(p[layer] for p in paths[i:i + 4]) == list('0123') for i in range(0, len(paths), 4) for layer in range(4))
    else:
        assert len(paths) == 18


def test_interrupted_in_the_middle_of_an_epoch_it_goes_on_there(tmp_path, stop_at):
    "Stopped by control.json, started again: the same as without a stop."
    whole = train_supernet(toy(tmp_path/'whole', method='spos', epochs=2), report=None)
    cfg = toy(tmp_path/'cut', method='spos', epochs=2)
    cut = stop_at(SupernetTrainer(cfg, report=None), 7).train()
    assert cut.status == 'stopped' and cut.status_text == 'asked to stop' and cut.checkpoint()[0] == 7
    cut = train_supernet(cfg, report=None)
    assert cut.status == 'ended'
    assert same_weights(weights(whole), weights(cut))


def test_a_loss_that_is_no_number_is_skipped_and_reported(tmp_path):
    "Two bad steps change no weight and are reported; a run of them ends with a sentence and the last good checkpoint."
    trainer = SupernetTrainer(toy(tmp_path/'some', method='spos', epochs=1), report=None)
    criterion, before = trainer.criterion, {}
    def sometimes(logits, y):
        if trainer.step == 6:
            before.update({k: v.clone() for k, v in trainer.net.named_parameters()})
        if trainer.step == 8:
            assert all(torch.equal(v, before[k]) for k, v in trainer.net.named_parameters())
        return criterion(logits, y) * (float('nan') if trainer.step in (6, 7) else 1)
    trainer.criterion = sometimes
    run = trainer.train()
    assert run.status == 'ended' and before
    assert run.events('warning').message.str.contains('2 of 5 steps were skipped').any()
    assert all(v.isfinite().all() for v in weights(run).values() if v.is_floating_point())

    trainer = SupernetTrainer(toy(tmp_path/'all', method='spos', save_every=0.), report=None)
    criterion_, n = trainer.criterion, 12
    trainer.criterion = lambda logits, y: criterion_(logits, y) * (float('nan') if trainer.step >= n else 1)
    with pytest.raises(InputError, match='consecutive losses were not finite'):
        trainer.train()
    run = Run.open(tmp_path/'all')
    assert run.status == 'stopped' and 'not finite' in run.status_text
    assert run.checkpoint()[0] == 10 and all(v.isfinite().all() for v in weights(run).values() if v.is_floating_point())


def test_control_is_obeyed_and_nonsense_ignored(tmp_path):
    "Another threshold and a veto are taken and logged; a veto of an op that does not exist is reported."
    cfg = toy(tmp_path/'run', method='spos', epochs=2)
    trainer, asked = SupernetTrainer(cfg, report=None), {
        3: dict(merge_threshold=.5, vetoes=[[0, 'ID', 'MB3_K3']]), 6: dict(vetoes=[[0, 'ID', 'MB9']]), 9: dict(vetoes=[[99, 'ID', 'MB3_K3']])}
    step = trainer.train_step
    def ask(x, y):
        step(x, y)
        if trainer.step in asked:
            write_control(cfg.run_dir, **asked[trainer.step])
    trainer.train_step = ask
    run = trainer.train()
    control = run.events('control')
    assert control.merge_threshold.tolist() == [.5] and control.vetoes.tolist() == [[[0, 'ID', 'MB3_K3']]]
    assert trainer.algorithm.threshold == .5
    warnings = run.events('warning').message
    assert warnings.str.contains("control.json is ignored: Unknown op of toy 'MB9'").sum() == 1
    assert warnings.str.contains('control.json is ignored: layer of a veto is 99').sum() == 1


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_loses_nothing(tmp_path, start):
    "With no room for a checkpoint the run ends with a sentence; with room again it goes on."
    cfg = toy(tmp_path/'run', method='spos', epochs=3, save_every=0.)
    limit = 'import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))'
    process = start(cfg, limit)
    stderr = process.communicate()[1]
    assert process.returncode != 0 and 'cannot be written' in stderr
    run = train_supernet(cfg, report=None)
    whole = train_supernet(toy(tmp_path/'whole', method='spos', epochs=3), report=None)
    assert run.status == 'ended' and same_weights(weights(run), weights(whole))


def additive(space, seed=0):
    "An evaluator of a space whose ops have additive scores, most of them the same in all layers."
    g = torch.Generator().manual_seed(seed)
    score = torch.randn(space.n_ops, generator=g) + .3*torch.randn(space.n_layers, space.n_ops, generator=g)
    def evaluate(paths):
        loss = -score[torch.arange(space.n_layers), paths].sum(1)
        return Scores(loss, -loss)
    return evaluate


def rounds_of(n=3, **changes):
    "The events of some rounds on an additive truth, without a supernet."
    space, events = get_space('toy'), []
    cfg = toy('', m=150, filter_dim=16, filter_iters=0, **changes)
    algorithm = Algorithm1(cfg, space, additive(space), log=lambda kind, **facts: events.append(dict(kind=kind, **facts)))
    for epoch in range(cfg.warmup_epochs, cfg.warmup_epochs + n):
        algorithm.round(epoch)
        algorithm.begin(epoch)
        paths = torch.cat([algorithm.sample() for _ in range(50)])
        assert space.alive[torch.arange(space.n_layers), paths].all()
    return space, algorithm, pd.DataFrame(events)


def test_rounds_label_learn_and_follow_q():
    "Kept shares fall as q rises, agreement is measured from the second round on, and no filter is called degenerate."
    space, algorithm, events = rounds_of(4, op_shrinkage=False)
    rounds = events[events.kind == 'round']
    assert not rounds.verdict.any() and rounds.u.notna().tolist() == [False, True, True, True]
    assert (rounds.n_weak / (rounds.q * rounds.m)).between(.7, .95).all()                 # the others are held out
    assert (rounds.kept - (1 - rounds.q)).abs().max() < .25 and rounds.kept.iloc[-1] < rounds.kept.iloc[0]
    assert not (events.kind == 'merge').any() and space.alive.all()


def test_merges_follow_the_plan():
    "With a low threshold ops go, round by round, no more than the cap, and are never drawn again."
    space, algorithm, events = rounds_of(3, merge_threshold=.3, max_merges=2)
    done = events[(events.kind == 'merge') & (events.decision == 'merge')]
    assert len(done) and done.groupby('round').size().max() <= 2
    assert int((~space.alive).sum()) == len(done)
    assert events[events.kind == 'round'].ops.iloc[-1] == int(space.alive.sum())


def test_a_degenerate_filter_is_reported_and_not_acted_on():
    "With scores that are pure noise nothing is merged, and training goes on with uniform paths."
    space, events, g = get_space('toy'), [], torch.Generator().manual_seed(0)
    def noise(paths): return Scores(torch.rand(len(paths), generator=g), torch.rand(len(paths), generator=g))
    algorithm = Algorithm1(toy('', merge_threshold=0.), space, noise, log=lambda kind, **f: events.append(dict(kind=kind, **f)))
    facts = algorithm.round(2)
    algorithm.begin(2)
    algorithm.sample()
    assert facts['verdict'] and not facts['merged'] and not facts['stop'] and space.alive.all()
    assert any(e['kind'] == 'warning' and 'is rejected' in e['message'] for e in events)
    assert algorithm.current.take_stats()['rate'] == 1


@pytest.mark.parametrize('rule, facts, expected', [
    ('guarded', dict(u=.95, kappa=.8, q=.8, round=5), True), ('guarded', dict(u=.95, kappa=.1, q=.8, round=5), False),
    ('guarded', dict(u=.95, kappa=.8, q=.8, round=1), False), ('guarded', dict(u=.95, kappa=.8, q=.5, round=5), False),
    ('guarded', dict(u=.95, kappa=.8, q=.8, round=5, verdict='bad'), False), ('guarded', dict(q=.8, round=5), False),
    ('paper', dict(u=.95, kappa=.0, q=.5, round=1), True), ('paper', dict(u=.85, q=.9, round=9), False),
    ('none', dict(u=1., kappa=1., q=.9, round=9), False)])
def test_stopping_rules(rule, facts, expected):
    "The bare rule looks at u alone; ours also at kappa, q, the number of rounds and the verdict."
    assert may_stop(TrainConfig(stop_rule=rule), facts) == expected


def test_agreement_by_hand():
    "3 of 4 equal; by chance 0.5*0.75 + 0.5*0.25 = 0.5."
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, True, True, False])
    assert agreement(a, b) == (.75, .5)
    assert agreement(a | True, a | True) == (1., 0.)


def test_training_stops_when_filters_agree(tmp_path):
    "With a beta that is always met, the paper's rule ends the run at the second round, and the run counts as ended."
    run = train_supernet(toy(tmp_path/'run', stop_rule='paper', beta=0.), report=None)
    assert run.status == 'ended' and 'is above beta' in run.status_text and len(run.events('round')) == 2


def test_bad_configs_are_answered_with_a_sentence(tmp_path):
    "Before any work starts, and without a trace in the run folder."
    for changes, says in [(dict(q_start=.9, q_end=.5), 'q rises'), (dict(method='darts'), 'Allowed: greedynasv2'),
                          (dict(batch_size=100_000), 'training images'), (dict(space='mbs'), "Did you mean 'mbse'"),
                          (dict(data='/nowhere'), 'nowhere'), (dict(device='cuda:7'), 'CUDA')]:
        if 'device' in changes and torch.cuda.is_available():
            continue
        with pytest.raises(InputError, match=says):
            train_supernet(toy(tmp_path/'run', **changes), report=None)
    assert not (tmp_path/'run').exists()
    assert [e for e in range(8) if is_round(toy('', method='spos'), e)] == []


DEATHS = [  # (changes of the run, what dies, at which call of it): the process is gone in the middle of it, at once
    (dict(), 'SupernetTrainer._compare', 1),                                        # after the last checkpoint, before the end
    (dict(stop_rule='paper', beta=0.), 'SupernetTrainer._compare', 1),              # the stop was decided, and nothing says so yet
    (dict(), 'Algorithm1.learn', 2),                                          # in a round, right after an epoch's last step
    (dict(warmup_epochs=0), 'SupernetTrainer.train_epoch', 1),                      # after a round before the first step
    (dict(), 'Run._prune', 3),                                              # a checkpoint is there, the old one too
    (dict(method='greedynas'), 'SupernetTrainer.train_step', 50), (dict(method='fairnas', epochs=3), 'SupernetTrainer.train_step', 30)]


@pytest.mark.slow
@pytest.mark.parametrize('changes, place, call', DEATHS)
def test_killed_where_it_hurts(tmp_path, start, changes, place, call):
    "Dead in the middle of what takes long or comes last: the next start ends with the same events, tensors and results."
    die = ('import os, greedynasv2.training as t; calls = [0]; cls, name = {!r}.split("."); cls = getattr(t, cls); old = getattr(cls, name)\n'
           'def new(self, *args):\n'
           '    calls[0] += 1\n'
           '    if calls[0] == {}: os._exit(9)\n'
           '    return old(self, *args)\n'
           'setattr(cls, name, new)').format(place, call)
    changes = dict(dict(epochs=4, q_epochs=2), **changes)
    whole = train_supernet(toy(tmp_path/'whole', **changes), report=None)
    cfg = toy(tmp_path/'killed', save_every=0., **changes)
    assert start(cfg, die).wait() == 9
    killed = train_supernet(cfg, report=None)
    assert killed.status == 'ended' and same_events(whole, killed) == []
    assert same_weights(weights(whole), weights(killed)) and whole.results == killed.results


def test_infinite_images_leave_nothing_behind(tmp_path):
    "A batch of infinities: its step is skipped, and no statistics of batch norms stay infinite."
    trainer = SupernetTrainer(toy(tmp_path/'run', method='spos', epochs=1), report=None)
    step = trainer.train_step
    trainer.train_step = lambda x, y: step(x * float('inf') if trainer.step == 3 else x, y)
    run = trainer.train()
    assert all(v.isfinite().all() for v in weights(run).values() if v.is_floating_point())
    assert run.events('warning').message.str.contains('1 of 5 steps were skipped').any()


def test_a_veto_keeps_two_ops_apart():
    "The pair that would merge first stays when it is vetoed."
    _, _, events = rounds_of(1, merge_threshold=.0, max_merges=1)
    first = events[(events.kind == 'merge') & (events.decision == 'merge')].iloc[0]
    space, events = get_space('toy'), []
    algorithm = Algorithm1(toy('', m=150, filter_dim=16, filter_iters=0, merge_threshold=.0, max_merges=1), space, additive(space),
                        log=lambda kind, **facts: events.append(dict(kind=kind, **facts)))
    algorithm.vetoes = [[int(first.layer), first.kept, first.removed]]
    algorithm.round(2)
    merges = pd.DataFrame([e for e in events if e['kind'] == 'merge'])
    vetoed = merges[merges.decision == 'vetoed'].iloc[0]
    assert (vetoed.layer, {vetoed.kept, vetoed.removed}) == (first.layer, {first.kept, first.removed})
    assert merges[merges.decision == 'merge'].iloc[0][['layer', 'removed']].tolist() != first[['layer', 'removed']].tolist()


def test_an_epoch_without_a_draw_has_its_line(tmp_path):
    "Paths that were drawn before suffice for an epoch: there is no rate to tell, and the line does without."
    said = []
    trainer = SupernetTrainer(toy(tmp_path/'run', method='spos', epochs=1, n_train=32), report=said.append)
    trainer.log_accepted = lambda: None
    assert trainer.train().status == 'ended' and 'epoch 1/1: loss' in said[0] and 'keeps' not in said[0]


def test_rounds_remember():
    "Labels come from the last rounds, by today's q; the last word on a path counts, and dropped ops are forgotten."
    space = get_space('nasbench_macro')
    algorithm = Algorithm1(TrainConfig(m=100, memory=2), space, lambda p: Scores(p.sum(1).float(), p.sum(1).float()))
    for round_, q in enumerate((.5, .6, .7)):
        algorithm.n_rounds = round_
        labels = algorithm.label(q)
        weak, unlabelled, (held, rank) = labels.weak, labels.unlabelled, labels.unseen
        assert .7 < len(unlabelled) / round(10 * q * 100) < .9                   # the others are held out
    assert len(algorithm.memory.paths) == 200 and .65 * 160 < len(weak) < .75 * 180 and 20 <= len(held) <= 60
    assert weak.sum(1).float().min() >= held[rank <= .3].sum(1).float().max() - 1   # high sums are the worst, whatever the round
    assert algorithm.held_out(held).all() and not algorithm.held_out(torch.cat([weak, unlabelled])).any()
    space.drop(0, 2)
    algorithm.n_rounds = 3
    labels = algorithm.label(.7)
    weak, (held, _) = labels.weak, labels.unseen
    assert (torch.cat([weak, held])[:, 0] != 2).all() and len(weak) + len(held) < 150


def test_a_filter_that_lost_what_the_last_one_knew_is_not_acted_on():
    "It has to keep better paths, or to choose as well; what cannot be judged passes."
    old = Skill(.08, .93, .05)
    assert all(check_skill(now, old) == '' for now in [Skill(.07, .80, .05), Skill(.20, .90, .05), None])
    assert 'mean rank 17%, its skill is 0.70 (± 0.08); the filter before it has 8% and 0.93' in check_skill(Skill(.17, .70, .08), old)
    assert check_skill(Skill(.49, .02, .05), None) == '' and 'guessing gives 50%' in check_skill(Skill(.51, -.02, .05), None)
    assert check_share(.04, .9) == '' and 'keeps 3.0% of all paths, where 10.0%' in check_share(.03, .9)


def test_a_filter_is_judged_by_what_it_keeps_of_the_paths_that_were_held_out():
    "Skill is 1 for the best share, whatever it is, 0 on average for a random one; all or nothing is no choice."
    algorithm = Algorithm1(TrainConfig(m=100), get_space('toy'), None)
    paths, rank = torch.arange(500)[:, None].expand(-1, 4), 1 - torch.arange(500).double() / 500
    for share in (.05, .3, .9):
        algorithm.filt.is_weak = lambda p: p[:, 0] < 500 * (1 - share)
        mean, skill, error = algorithm.skill(paths, rank)
        assert abs(mean - share / 2) < .01 and abs(skill - 1) < .03 and error > 0
    guesses = []
    for seed in range(40):
        algorithm.filt.is_weak = lambda p: torch.rand(len(p), generator=torch.Generator().manual_seed(seed)) > .2
        guesses.append(algorithm.skill(paths, rank))
    skills = torch.tensor([g[1] for g in guesses])
    assert skills.mean().abs() < .03 and .5 < skills.std() / guesses[0][2] < 1.5     # the error is what it says
    for everything in (True, False):
        algorithm.filt.is_weak = lambda p: torch.full((len(p),), everything)
        assert algorithm.skill(paths, rank) is None


def test_an_older_filter_that_stands_in_is_tightened_if_held_out_paths_agree():
    "It keeps the share 1 - q that it likes best, and what it kept before where that would be worse."
    space = get_space('toy')
    algorithm, paths = Algorithm1(TrainConfig(m=100), space, None), space.sample(2000, torch.Generator().manual_seed(0))
    algorithm.filt.log_phi = lambda p: (p * torch.tensor([1., 1.3, 1.7, 2.1])).sum(1) - 100      # high sums are weak
    value = algorithm.filt.log_phi(paths)
    algorithm.filt.log_phi_max.fill_(value.median() + torch.tensor(2.).log())
    def kept(): return 1 - algorithm.filt.is_weak(paths).float().mean().item()
    rank = value.argsort().argsort().double() / len(value)              # the truth agrees
    def tighten(q, rank):
        labels = Labels(paths, rank, torch.ones(len(paths), dtype=torch.bool), paths[:0], paths, q, q)
        algorithm._tighten(labels, algorithm.skill(*labels.unseen))
    half = kept()
    tighten(.9, 1 - rank)
    assert kept() == half                                              # the truth is the other way round: as before
    for q in (.7, .9):
        tighten(q, rank)
        assert .8 * (1 - q) < kept() < 1.2 * (1 - q)
    tighten(.6, rank)
    assert kept() < .12                                                # never looser


def test_the_classifier_may_see_small_features_first(tmp_path):
    "`head_scale` is where the batch norm before the classifier starts; blocks are left alone."
    nets = [SupernetTrainer(toy(tmp_path/f'{scale}', head_scale=scale), None).net for scale in (1., .25)]
    assert [batch_norms(net.head)[-1].weight.unique().tolist() for net in nets] == [[1.], [.25]]
    assert all(torch.equal(a, b) for a, b in zip(nets[0].layers.parameters(), nets[1].layers.parameters()))
    with pytest.raises(InputError, match='head_scale is 0.0; it must be above 0'):
        toy(tmp_path, head_scale=0.)


def test_aligned_residual_branches_start_at_zero(tmp_path):
    "In aligned blocks with a shortcut the last batch norm starts at 0; others start at 1."
    blocks = [b for row in SupernetTrainer(toy(tmp_path, aligned=True), None).net.layers for b in row if isinstance(b, MBConv)]
    first = [(b.residual, batch_norms(b)[-1].weight.unique().tolist()) for b in blocks]
    assert {True, False} == {residual for residual, _ in first}
    assert all(weight == [0. if residual else 1.] for residual, weight in first)


def test_labels_may_stop_at_half_while_the_filter_grows_pickier(data_file):
    "With `q_label` the worse half is labelled whatever q is, and the filter is tightened to 1 - q, also after a merge."
    data_file('nas-bench-macro_cifar10.json')
    cfg = make_config('paper_mobile', space='nasbench_macro', m=300, filter_dim=16, filter_iters=150, q_label=.5, warmup_epochs=0,
                      q_epochs=2, q_end=.9, round_every=1, epochs=4, merge_threshold=.2)
    space = get_space('nasbench_macro')
    algorithm = Algorithm1(cfg, space, macro_evaluator())
    rounds = [algorithm.round(epoch) for epoch in range(3)]
    assert [round(r['q'], 2) for r in rounds] == [.5, .7, .9] and sum(r['merged'] for r in rounds) > 0
    assert all(r['n_weak'] < .55 * len(algorithm.memory.paths) for r in rounds)
    sound = [r for r in rounds if not r['verdict']]
    assert sound and all(r['kept'] < 1.3 * (1 - r['q']) for r in sound[1:])
    alive = space.sample(5000)
    assert (~algorithm.filt.is_weak(alive)).float().mean() < .2


def test_a_round_that_teaches_nothing_leaves_the_older_filter_tightened(monkeypatch):
    "The filter of the round before stays, keeps no more than it should at the new q, and nothing is merged."
    _, algorithm, events = rounds_of(1)
    assert algorithm.filt.rounds == 1 and not algorithm.filt.verdict
    before = {k: v.clone() for k, v in algorithm.filt.state_dict().items()}
    monkeypatch.setattr('greedynasv2.algorithm.weak_prior', lambda cfg, epoch: .9)
    def fails(filt, *args):
        filt.start(FilterConfig())
        raise InputError('the loss became nan')
    monkeypatch.setattr('greedynasv2.vpu.train_filter', fails)
    facts = algorithm.round(3)
    after = algorithm.filt.state_dict()
    assert facts['verdict'] == 'the loss became nan' and not facts['merged'] and not algorithm.filt.verdict
    assert all(torch.equal(before[k], after[k]) for k in before if k != 'log_phi_max')
    assert after['log_phi_max'] < before['log_phi_max'] and .05 < facts['kept'] < .15


@pytest.mark.parametrize('given, says', [
    (dict(filter='vpuu'), "Unknown filter 'vpuu'. Did you mean 'vpu'"), (dict(sampler='unifrom'), "Did you mean 'uniform'"),
    (dict(shrinker='marge'), "Did you mean 'merge'"), (dict(method='spos', sampler='filtered'), 'filter is none'),
    (dict(sampler='uniform', filter='none'), 'shrinker none'), (dict(method='spos', filter='vpu'), 'never used'),
    (dict(sampler='fair', filter='none', shrinker='none', warm_from='x'), 'no warm-up')])
def test_parts_that_do_not_fit_are_refused(given, says):
    "By name or by combination, before any work starts."
    with pytest.raises(InputError, match=says):
        toy('', **given)


def test_a_folder_without_newer_parameters_goes_on(tmp_path):
    "A parameter that an older config.json lacks means what that version did; another value that was asked for is refused."
    cfg = toy(tmp_path/'old', method='spos', epochs=2)
    train_supernet(cfg.replace(stop_epoch=1), report=None)
    file = tmp_path/'old'/'config.json'
    about = json.loads(file.read_text())
    for name in ABSENT:
        del about['parameters'][name]
    file.write_text(json.dumps(about))
    with pytest.raises(InputError, match=r"sampler \('fair' given, '' there\)"):
        train_supernet(cfg.replace(sampler='fair'), report=None)
    old = train_supernet(cfg, report=None)
    whole = train_supernet(toy(tmp_path/'whole', method='spos', epochs=2), report=None)
    assert old.status == 'ended' and same_weights(weights(old), weights(whole))
    assert train_supernet(cfg, report=None).results == whole.results          # ended: returned as it is
    assert read_config(old).lr == cfg.lr and read_config(old).sampler == ''
    with pytest.raises(InputError, match=r'lr \(0.5 given'):
        train_supernet(cfg.replace(lr=.5), report=None)


def test_parts_by_name(tmp_path):
    "A part replaces that of the method; the run's folder is named after it, and it goes on from its checkpoint."
    cfg = toy(tmp_path/'run', filter='nnpu', shrinker='none', epochs=3)
    assert parts_of(cfg) == ('filtered', 'nnpu', 'none', 'one')
    cut = train_supernet(cfg.replace(stop_epoch=2), report=None)
    assert cut.status == 'stopped' and cut.filter.kind == 'nnpu'
    run = train_supernet(cfg, report=None)
    assert run.status == 'ended' and run.filter.kind == 'nnpu' and not len(run.events('merge'))
    assert run.filter_at(0).kind == 'nnpu'


def test_a_filter_that_judges_itself_gets_all_paths():
    "Nothing is held out for it, and what it says about its skill goes into the event."
    class Sure(FILTERS['vpu']):
        judges_itself = True
        def fit(self, labels, seed):
            assert not labels.held_out.any() and len(labels.unlabelled) == 10 * round(labels.q_weak * 150)
            assert labels.round.tolist() == sorted(labels.round.tolist()) and len(labels.paths) == 150 * (1 + int(labels.round[-1] > 0))
            return {**super().fit(labels, seed), 'place': .9, 'skill': .8}
    try:
        FILTERS['sure'] = Sure
        space, algorithm, events = rounds_of(2, filter='sure', shrinker='none', memory=2)
        assert events[events.kind == 'round'].skill.tolist() == [.8, .8]
    finally:
        del FILTERS['sure']


def test_simulation_knows_no_weights_and_gives_alive_paths():
    "Every epoch once, the asked number of paths, better ones after warm-up than in it."
    space = get_space('toy')
    evaluate = additive(space)
    cfg = toy('', m=150, filter_dim=16, filter_iters=0, merge_threshold=.3)
    found = {epoch: paths for epoch, paths in simulate(cfg, space, evaluate, paths_per_epoch=30)}
    assert list(found) == list(range(cfg.epochs)) and {len(paths) for paths in found.values()} == {30}
    assert space.is_alive(found[cfg.epochs - 1]).all()
    assert evaluate(found[cfg.epochs - 1]).loss.mean() < evaluate(found[0]).loss.mean()
