"""The README is true: its example runs, and every setting, command and file it names is there."""

import pathlib
import re

import numpy as np
import tensorflow as tf

from ctl import config as config_lib
from ctl.experiment import list_experiments, load_experiment
from tests.runs import Workdir, door, overrides
from tools.record_files import make_example

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / 'README.md').read_text()


def test_the_readmes_experiment_trains_to_a_lower_loss(tmp_path):
    (code,) = re.findall(r'```python\n(.*?)```', README, re.DOTALL)
    (tmp_path / 'digits.py').write_text(code)
    rng = np.random.default_rng(0)
    for split in ('train', 'eval'):
        with tf.io.TFRecordWriter(str(tmp_path / split)) as writer:
            for _ in range(100):
                label = rng.integers(10)
                pixels = rng.random(64, np.float32) + 2 * np.eye(10, 64, dtype=np.float32)[label]
                writer.write(make_example({'pixels': pixels, 'label': np.array([label])}).SerializeToString())
    words = overrides(data__train=tmp_path / 'train', data__eval=tmp_path / 'eval', train__steps=60, eval__every=30)
    words += overrides(optimizer__learning_rate=0.01, devices__replicas=2)
    assert door(f'--experiment={tmp_path / "digits.py"}', *words, f'--workdir={tmp_path / "run"}') == 0
    first, last = Workdir(tmp_path / 'run').lines('eval')
    assert last['loss'] < first['loss'] and last['accuracy'] > 0.5


def test_every_setting_the_readme_names_exists():
    configs = [load_experiment(name).get_config() for name in list_experiments()]
    sections = '|'.join([*config_lib.BASE, 'optimizer', 'generator', 'discriminator'])
    prose = re.sub(r'```python.*?```', '', README, flags=re.DOTALL)
    named = set(re.findall(rf'(?<![\w./])((?:{sections}|model)\.[a-z_]+)\b', prose))
    assert len(named) >= 10
    there = {key for config in configs for key in config_lib.flatten(config)}
    assert named <= there, named - there


def test_every_test_and_file_the_readme_names_exists():
    for path in re.findall(r'\b(?:tests|ctl|experiments|tools)/[\w/]+\.py', README):
        assert (ROOT / path).exists(), path
    every_test = ''.join(path.read_text() for path in (ROOT / 'tests').glob('test_*.py'))
    for words in re.findall(r'pytest [^`]*-k (\w+)', README):
        assert re.search(rf'def test_\w*{words}', every_test), words
