"""Several real workers, each a process: one run, whatever happens to one of them."""

import contextlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import image_records
from tests.bert_records import VOCAB, make_record, write_file
from tests.runs import (
    DEADLINE,
    Workdir,
    door,
    door_until,
    finish,
    overrides,
    printed_after,
    relative_difference,
    start_workers,
    walk,
    without_rates,
    words_for_the_door,
    write_shallow,
)

TRAIN = ('-m', 'ctl.train')
TOGETHER = overrides(devices__strategy='multi_worker', devices__start_timeout=600)


@pytest.fixture(scope='module')
def flags(tmp_path_factory):
    """4 shards, as 1, 2 or 4 replicas may have; evaluation records that do not divide."""
    data = write_shallow(tmp_path_factory.mktemp('data'), eval_counts=(7, 6))
    return data + overrides(train__steps=20, data__logical_shards=4, eval__every=8, checkpoint__every=5)


@pytest.fixture(scope='module')
def alone(flags, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('alone')
    assert door(*flags, f'--workdir={workdir}') == 0
    return Workdir(workdir)


def check_same(found, expected):
    assert relative_difference(expected.weights, found.weights) <= 1e-5
    assert [(line['step'], line['kind']) for line in found.metrics] == [
        (line['step'], line['kind']) for line in expected.metrics
    ]
    for a, b in zip(without_rates(expected.metrics), without_rates(found.metrics), strict=True):
        assert b['loss'] == pytest.approx(a['loss'], rel=1e-5)


@pytest.mark.xdist_group('workers')
@pytest.mark.slow
@pytest.mark.parametrize('count', [2, 3, 4])
def test_several_workers_make_the_run_that_one_makes(flags, alone, tmp_path, count):  # C01, C08, C30, C31, C43
    """Also for an evaluation that does not divide; and only the chief writes."""
    if count == 3:
        flags = [*flags, *overrides(train__global_batch_size=12, data__logical_shards=12)]
        assert door(*flags, f'--workdir={tmp_path / "alone"}') == 0
        alone, tmp_path = Workdir(tmp_path / 'alone'), tmp_path / 'together'
    words = [*flags, *TOGETHER, f'--workdir={tmp_path}', '--config.checkpoint.best_metric=loss']
    workers = start_workers(count, *TRAIN, *words)
    outputs = finish(workers)
    assert [worker.returncode for worker in workers] == [0] * count, outputs
    check_same(Workdir(tmp_path), alone)
    assert f'{count}, of 1 replicas each: 127.0.0.1:' in outputs[0][0]
    for out, _ in outputs[1:]:
        assert 'step ' not in out
    check_what_is_left(tmp_path)
    assert (tmp_path / 'checkpoints' / 'best').is_dir()


def check_what_is_left(workdir):
    """Only the chief writes."""
    left = sorted(path.name for path in workdir.iterdir())
    assert left == ['checkpoints', 'config.json', 'metrics.jsonl', 'run.json', 'tensorboard', 'time.json']
    names = {path.name for path in (workdir / 'checkpoints').iterdir()}
    assert all(re.fullmatch(r'best|checkpoint|ckpt-\d+\.(index|data-00000-of-00001)', name) for name in names)


@pytest.mark.slow
@pytest.mark.xdist_group('workers')
def test_a_gan_on_two_workers_is_the_gan_on_one(tmp_path):
    """With a synchronised batch norm, noise that goes with the record, and pictures that the chief draws."""
    words = image_records.write_data(
        tmp_path,
        train__steps=10,
        eval__at_start='true',
        train__fresh_batches='true',
        discriminator__updates=2,
        model__noise='record',
        model__generator_norm='sync_batch',
        data__logical_shards=2,
    )
    assert door(*words, f'--workdir={tmp_path / "alone"}') == 0
    workers = start_workers(2, *TRAIN, *words, *TOGETHER, f'--workdir={tmp_path / "together"}')
    outputs = finish(workers)
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    alone, together = Workdir(tmp_path / 'alone'), Workdir(tmp_path / 'together')
    check_same(together, alone)
    for a, b in zip(alone.lines('eval'), together.lines('eval'), strict=True):
        assert b['frechet_distance'] == pytest.approx(a['frechet_distance'], rel=1e-4)
    pictures = sorted(path.name for path in (tmp_path / 'together' / 'pictures').iterdir())
    assert pictures == ['samples-0.png', 'samples-10.png']


FAILS_ON_WORKER_1 = '''
"""shallow_bert, with a number of its evaluation that cannot be had on worker 1."""
import dataclasses
import json
import os
import tensorflow as tf
from ctl.experiment import Tally
from tests import shallow_bert
from tests.shallow_bert import get_config

def values(sums):
    worker = json.loads(os.environ.get('TF_CONFIG', '{"task": {"index": 0}}'))['task']['index']
    return {'records': float(sums['records']) / (1 - worker)}

def make_experiment(config):
    tally = Tally(lambda batch: {'records': tf.reduce_sum(batch['example_weight'])}, values, ['records'])
    return dataclasses.replace(shallow_bert.make_experiment(config), tallies=[tally])
'''


@pytest.mark.slow
@pytest.mark.xdist_group('workers')
def test_an_evaluation_that_fails_on_one_worker_is_saved_before_by_all(flags, tmp_path):
    (tmp_path / 'fails.py').write_text(FAILS_ON_WORKER_1)
    data = [word for word in flags if not word.startswith('--experiment')]
    words = [f'--experiment={tmp_path / "fails.py"}', *data, f'--workdir={tmp_path / "run"}']
    words += overrides(train__steps=8, checkpoint__every=100)
    workers = start_workers(2, *TRAIN, *words, *TOGETHER)
    outputs = finish(workers)
    assert [worker.returncode for worker in workers] == [3, 1], outputs
    assert 'the evaluation failed at worker 1' in outputs[0][1]
    assert 'ZeroDivisionError' in outputs[1][1]
    assert [path.stem for path in (tmp_path / 'run' / 'checkpoints').glob('*.index')] == ['ckpt-8']
    assert door(*words) == 0
    assert [line['records'] for line in Workdir(tmp_path / 'run').lines('eval')] == [13.0]


SLOW_EVALUATION = """
import os, signal, sys, time
from ctl import evaluator, train
from ctl.runtime import agreement
agreement.EVALUATION_SECONDS = 0.02  # and a batch takes 0.01
reduce = evaluator.Evaluator.eval_reduce
reduced = 0
def reduce_slowly(self, *arguments):
    global reduced
    time.sleep(0.01)
    reduced += 1
    if reduced == 5 and '"index": 1' in os.environ['TF_CONFIG']:
        os.kill(os.getpid(), signal.SIGTERM)
    return reduce(self, *arguments)
evaluator.Evaluator.eval_reduce = reduce_slowly
code = train.main(sys.argv[1:])
print('batches evaluated:', reduced)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.xdist_group('workers')
def test_a_signal_to_one_worker_in_an_evaluation_ends_it_for_all_after_the_same_batch(tmp_path):
    """Of 50 batches; and the evaluation comes first when the run goes on."""
    words = [*write_shallow(tmp_path, eval_counts=(200, 200)), f'--workdir={tmp_path / "run"}']
    words += overrides(train__steps=6, eval__every=4, checkpoint__every=100)
    workers = start_workers(2, '-c', SLOW_EVALUATION, *words, *TOGETHER)
    outputs = finish(workers, timeout=280)
    assert [worker.returncode for worker in workers] == [75, 75], outputs
    assert 'a signal at worker 1' in outputs[0][1] and 'saved at step 4' in outputs[0][1]
    assert 'SIGTERM received: saved at step 4' in outputs[1][1]
    evaluated = [int(printed_after('batches evaluated: ', out)) for out, _ in outputs]
    assert evaluated[0] == evaluated[1] and 5 <= evaluated[0] < 50
    assert Workdir(tmp_path / 'run').lines('eval') == []
    assert door(*words) == 0
    assert [line['step'] for line in Workdir(tmp_path / 'run').lines('eval')] == [4, 6]


@pytest.mark.slow
@pytest.mark.xdist_group('workers')
@pytest.mark.parametrize('number', [600, 1100])  # when all ask each other again and again, and in the last batches
def test_a_record_that_one_worker_cannot_evaluate_is_saved_before_by_all(tmp_path, number):
    words = [*write_shallow(tmp_path, eval_counts=(1200, 1200)), f'--workdir={tmp_path / "run"}']
    words += overrides(train__steps=6, eval__every=4, checkpoint__every=100)
    rng = np.random.default_rng(2)
    wrong = [make_record(rng, **({'masked_lm_ids': np.full(5, VOCAB)} if i == number else {})) for i in range(1200)]
    write_file(tmp_path / 'eval-1.tfrecord', wrong)  # worker 1's
    workers = start_workers(2, *TRAIN, *words, *TOGETHER)
    outputs = finish(workers, timeout=280)
    assert [worker.returncode for worker in workers] == [3, 2], outputs
    assert 'the evaluation failed at worker 1' in outputs[0][1]
    assert f'eval-1.tfrecord: record {number}' in outputs[1][1] and f'has id {VOCAB}' in outputs[1][1]
    assert [path.stem for path in (tmp_path / 'run' / 'checkpoints').glob('*.index')] == ['ckpt-4']


@pytest.mark.slow
@pytest.mark.xdist_group('workers')
def test_a_run_goes_on_with_fewer_workers(flags, alone, tmp_path):
    words = [*flags, f'--workdir={tmp_path}']
    workers = start_workers(2, *TRAIN, *words, *TOGETHER, '--config.log.every=1')
    try:
        for line in workers[0].stdout:
            if line.startswith('step 7/'):
                workers[1].send_signal(signal.SIGTERM)  # not the chief: they agree
                break
    finally:
        outputs = finish(workers)
    assert [worker.returncode for worker in workers] == [75, 75], outputs
    assert 'a signal at worker 1' in outputs[0][1] and 'Go on with: ' in outputs[0][1]
    assert door(*words) == 0
    check_same(Workdir(tmp_path), alone)


@pytest.mark.slow
@pytest.mark.xdist_group('workers')
def test_a_run_goes_on_with_more_workers(flags, alone, tmp_path):
    words = [*flags, f'--workdir={tmp_path}']
    door_until(13, *words)
    workers = start_workers(2, *TRAIN, *words, *TOGETHER)
    outputs = finish(workers)
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    check_same(Workdir(tmp_path), alone)


UP_TO = """
import sys
from tests.runs import door_until
door_until(int(sys.argv[1]), *sys.argv[2:])
"""


@pytest.mark.slow
@pytest.mark.xdist_group('workers')
def test_a_run_goes_on_between_1_2_and_3_workers_in_every_direction(flags, tmp_path):
    """3 workers do not divide the 4 shards."""
    words = [*flags, '--config.train.global_batch_size=24']
    assert door(*words, f'--workdir={tmp_path / "alone"}') == 0
    words.append(f'--workdir={tmp_path / "together"}')
    *before, last = walk([1, 2, 3])
    assert last == 1
    for step, count in enumerate(before, start=3):
        if count == 1:
            door_until(step, *words)
            continue
        workers = start_workers(count, '-c', UP_TO, str(step), *words, *TOGETHER)
        outputs = finish(workers)
        assert [worker.returncode for worker in workers] == [0] * count, outputs
    assert door(*words) == 0
    check_same(Workdir(tmp_path / 'together'), Workdir(tmp_path / 'alone'))


@pytest.mark.slow
@pytest.mark.xdist_group('workers')
@pytest.mark.parametrize('lost', [1, 0])
def test_the_others_end_when_a_worker_is_lost_and_name_it_and_the_checkpoint(flags, tmp_path, lost):  # C54
    words = [*flags, *TOGETHER, f'--workdir={tmp_path}', '--config.train.steps=100000', '--config.eval.every=0']
    workers = start_workers(2, *TRAIN, *words)
    try:
        for line in workers[0].stdout:
            if line.startswith('step 20/'):
                break
        workers[lost].kill()
    finally:
        outputs = finish(workers)
    left = 1 - lost
    assert workers[left].returncode == 75, outputs
    error = outputs[left][1].splitlines()[-1]
    assert re.match(lost_text(left, lost), error)
    assert words_for_the_door(printed_after('Go on with: ', error)) == words


@pytest.mark.slow
@pytest.mark.xdist_group('workers')
def test_workers_that_are_given_different_things_are_refused_by_name(flags, tmp_path):
    words = [*flags, *TOGETHER, f'--workdir={tmp_path}']
    workers = start_workers(2, *TRAIN, *words, for_the_last=['--config.optimizer.learning_rate=0.1'])
    outputs = finish(workers)
    assert [worker.returncode for worker in workers] == [2, 2], outputs
    for _, error in outputs:
        assert re.search(r'error: worker 1 at \S+ has another config than worker 0 at ', error)


@pytest.mark.slow
@pytest.mark.xdist_group('workers')
def test_workers_whose_workdirs_are_different_folders_are_refused_by_name(flags, tmp_path):
    """As on machines that do not share a disk: the second one's is another folder."""
    here, there = (tmp_path / name / 'run' for name in ('here', 'there'))
    workers = start_workers(
        2, '-c', SEES_SOON, *flags, *TOGETHER, f'--workdir={here}', for_the_last=[f'--workdir={there}']
    )
    outputs = finish(workers)
    assert [worker.returncode for worker in workers] == [2, 2], outputs
    for _, error in outputs:
        assert re.search(r'error: --workdir=\S+: what worker 0 at \S+ writes there is not seen by worker 1 at ', error)
    assert not list(there.glob('*'))


SEES_SOON = """
import sys
from ctl import train
from ctl.runtime import lock
lock.SEEN_SECONDS = 2.0
sys.exit(train.main(sys.argv[1:]))
"""


def lost_text(left, lost):
    """What worker `left` says when `lost` is gone, as a pattern."""
    return rf'worker {left} at \S+ lost worker {lost} at \S+ \(.+\): the newest checkpoint is \S+/ckpt-\d+\.'


@contextlib.contextmanager
def launching(*words):
    """tools.launch; nothing that it starts outlives the `with`."""
    command = [sys.executable, '-m', 'tools.launch', *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            while process.poll() is None:  # it passes signals on, and the second ends a worker at once
                process.terminate()
                time.sleep(0.1)


def launch(*words):
    with launching(*words) as process:
        out, error = process.communicate(timeout=DEADLINE)
    return subprocess.CompletedProcess(words, process.returncode, out, error)


@pytest.mark.xdist_group('workers')
def test_launch_starts_all_again_when_a_worker_is_lost_and_the_run_is_the_same(flags, alone, tmp_path):  # C54
    """The second worker kills itself once, at a checkpoint of the chief."""
    (tmp_path / 'fragile.py').write_text(f'''
"""An experiment whose worker 1 dies once."""
import json, os, pathlib, signal, threading, time
from tests.shallow_bert import get_config, make_experiment
def die():
    while not list(pathlib.Path({str(tmp_path / 'run')!r}).glob('checkpoints/ckpt-5.index')):
        time.sleep(0.001)
    if not os.path.exists({str(tmp_path / 'died')!r}):
        open({str(tmp_path / 'died')!r}, 'w').close()
        os.kill(os.getpid(), signal.SIGKILL)
if json.loads(os.environ['TF_CONFIG'])['task']['index'] == 1:
    threading.Thread(target=die, daemon=True).start()
''')
    words = [f'--experiment={tmp_path / "fragile.py"}', *flags[1:], f'--workdir={tmp_path / "run"}']
    result = launch('--workers=2', '--restarts=2', '--', *words, '--config.train.steps_per_loop=1')
    assert result.returncode == 0, result.stdout
    assert 'launch: a worker ended with 75; starting all again, 2 times at most.' in result.stdout
    assert re.search(rf'^worker 0 \| {lost_text(0, 1)}', result.stdout, re.MULTILINE)
    assert re.search(r'^worker 0 \| eval at step 20', result.stdout, re.MULTILINE)
    assert not re.search(r'^worker 1 \| (step|eval) ', result.stdout, re.MULTILINE)
    check_what_is_left(tmp_path / 'run')
    check_same(Workdir(tmp_path / 'run'), alone)


@pytest.mark.slow
@pytest.mark.xdist_group('workers')
def test_launch_does_not_restart_what_would_only_fail_again(flags, tmp_path):
    result = launch('--workers=2', '--restarts=3', '--', *flags, '--config.data.train=nope*', f'--workdir={tmp_path}')
    assert result.returncode == 2
    assert 'starting all again' not in result.stdout
    assert re.search(r'^worker \d \| error: data.train=nope\*: no file matches', result.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.xdist_group('workers')
def test_launch_passes_a_signal_on_and_ends_with_75(flags, tmp_path):
    words = ['--workers=2', '--restarts=5', '--', *flags, '--config.train.steps=100000', f'--workdir={tmp_path}']
    with launching(*words) as process:
        for line in process.stdout:
            if line.startswith('worker 0 | step 20/'):
                process.send_signal(signal.SIGTERM)
                break
        out = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 75
    assert 'worker 0 | SIGTERM received: saved at step' in out and 'starting all again' not in out
