"""A GAN of handwritten digits, 8 by 8 pixels: a small DCGAN, evaluated by its distance to digits held out.

    python -m ctl.train --experiment=gan_digits

Without data it trains on the 1,797 digits that scikit-learn ships. Your own records have 64 float `pixels` from 0 to 1
and an integer `label`.
"""

from collections.abc import Callable

import ml_collections

from ctl.command_line import say_aside
from ctl.config import Setting
from ctl.experiment import DefaultData, Experiment, Feature
from ctl.gan import players
from tools import make_digits


def get_config() -> ml_collections.ConfigDict:
    adam = dict(name='adam', learning_rate=1e-3, beta_1=0.5, weight_decay=0.0, clip_norm=0.0, schedule='linear')
    return players.make_config(
        train=dict(steps=3000, global_batch_size=64),
        eval=dict(every=1000),
        checkpoint=dict(every=1000),
        log=dict(every=100),
        generator=adam,
        discriminator=adam,
        model=dict(
            penalty='r1',
            penalty_weight=1.0,
            conditional=Setting(True, 'whether images are made of a class that is asked for'),
            generator_width=Setting(32, 'features of the generator at full size', minimum=1),
            discriminator_width=Setting(32, 'features of the discriminator at half of the size', minimum=1),
        ),
    )


def make_default_data(config: ml_collections.ConfigDict, say: Callable[[str], None]) -> DefaultData:
    """The digits of scikit-learn as records, made once and kept in the cache."""
    return make_digits.default_data(say)


def make_experiment(config: ml_collections.ConfigDict) -> Experiment:
    size, classes = make_digits.SIZE, make_digits.CLASSES if config.model.conditional else 0
    features = {'pixels': Feature((size, size, 1), 'float32')}
    if classes:
        features['label'] = Feature((), below=classes)

    def prepare(batch: dict) -> dict:
        return {'image': 2 * batch.pop('pixels') - 1, **batch}

    return players.make_experiment(
        config,
        features=features,
        prepare=prepare,
        size=size,
        channels=1,
        blocks=2,
        classes=classes,
        extract=make_digits.load_extractor(make_digits.folder(say_aside)),
    )
