"""From a generator and a discriminator to an experiment: two objectives, an average, the distances, a picture."""

import dataclasses
from collections.abc import Callable, Mapping

import keras
import ml_collections
import tensorflow as tf

from ctl import losses, seeds
from ctl.config import Setting, Value, add_settings, base_config, set_value
from ctl.errors import UserError
from ctl.experiment import Average, Experiment, Feature, Objective
from ctl.gan import distances, noise
from ctl.gan.grid import grid
from ctl.gan.losses import GAMES, r1, wgan_gp
from ctl.models import dcgan

ROWS = 8  # of the picture
COLUMNS = 8  # or one for each class, up to 10

ALWAYS_RIGHT = (
    'the discriminator tells every real image from every made one, and the generator learns next to nothing from it. '
    'Weaken it (discriminator.learning_rate, discriminator.updates, model.penalty_weight), or strengthen the generator.'
)
ALWAYS_WRONG = (
    'the discriminator takes every real image for a made one and every made one for real: it does not learn. '
    'Look at discriminator.learning_rate and discriminator.updates.'
)


def make_config(**sections: Mapping[str, Setting | Value]) -> ml_collections.ConfigDict:
    """The settings of a GAN, and per section an experiment's own: new ones as `Setting`, else another default."""
    config = base_config(optimizers=('generator', 'discriminator'), eval=dict(at_start=True))
    for player in ('generator', 'discriminator'):
        add_settings(config, player, updates=Setting(1, 'weight updates in one step', minimum=1))
    add_settings(
        config,
        'model',
        latent=Setting(64, 'random numbers that an image is made of', minimum=1),
        noise=Setting(
            'replica',
            'draw them for a whole replica at once, or for each record, the same on any hardware and slower',
            choices=('replica', 'record'),
        ),
        loss=Setting('nonsaturating', "both players' losses", choices=tuple(GAMES)),
        penalty=Setting('none', "on the discriminator's gradient", choices=('none', 'r1', 'wgan_gp')),
        penalty_weight=Setting(10.0, 'of the penalty in its loss', minimum=0),
        generator_norm=Setting('none', "between the generator's layers", choices=dcgan.NORMS),
        spectral_norm=Setting(False, "whether the discriminator's kernels are divided by their largest singular value"),
        average=Setting(
            0.999,
            'decay of the average of the generator that is evaluated and drawn; 0 is no average',
            minimum=0,
            below=1,
        ),
    )
    for section, values in sections.items():
        for key, value in values.items():
            if isinstance(value, Setting):
                add_settings(config, section, **{key: value})
            else:
                set_value(config, f'{section}.{key}', value)
    return config


@dataclasses.dataclass(frozen=True)
class _Players:
    """The two networks, and what they play by.

    Attributes:
      shown: the generator that is evaluated and drawn: its average, or itself.
      classes: 0 for none.
      settings: the section `model`.
    """

    generator: keras.Model
    discriminator: keras.Model
    shown: keras.Model
    classes: int
    settings: ml_collections.ConfigDict

    def make(self, generator: keras.Model, batch: dict, seed: seeds.Seed | None) -> tf.Tensor:
        """One image for each example, of its class: float32 [B, S, S, C]."""
        by_record = self.settings.noise == 'record'
        latent = noise.normal(batch, seed, noise.LATENT, self.settings.latent, by_record)
        return generator(latent, self._classes(batch), training=seed is not None)

    def _classes(self, batch: dict) -> tf.Tensor | None:
        return batch['label'] if self.classes else None

    def discriminator_losses(self, batch: dict, seed: seeds.Seed | None):
        """Its side of the game, and the penalty."""
        game, weights, real = GAMES[self.settings.loss], batch['example_weight'], batch['image']
        made = tf.stop_gradient(self.make(self.generator, batch, seed))
        labels = self._classes(batch)
        both = None if labels is None else tf.concat([labels, labels], 0)
        real_logits, made_logits = tf.split(self.discriminator(tf.concat([real, made], 0), both), 2)
        terms = {'discriminator_loss': losses.weighted_sum(game.discriminator(real_logits, made_logits), weights)}
        penalty = self._penalty(real, made, labels, batch, seed)
        if penalty is not None:
            terms['penalty'] = losses.weighted_sum(self.settings.penalty_weight * penalty, weights)
        metrics = {}
        if game.boundary is not None:
            right = [real_logits > game.boundary, made_logits < game.boundary]
            metrics['discriminator_accuracy'] = losses.weighted_sum(
                tf.add_n([tf.cast(each, tf.float32) for each in right]) / 2, weights
            )
        return terms, metrics

    def _penalty(self, real, made, labels, batch: dict, seed: seeds.Seed | None) -> tf.Tensor | None:
        def discriminate(images: tf.Tensor) -> tf.Tensor:
            return self.discriminator(images, labels)

        if self.settings.penalty == 'r1':
            return r1(discriminate, real)
        if self.settings.penalty == 'wgan_gp':
            mix = noise.uniform(batch, seed, noise.MIX, self.settings.noise == 'record')
            return wgan_gp(discriminate, real, made, mix)
        return None

    def generator_losses(self, batch: dict, seed: seeds.Seed | None):
        """The other side."""
        made = self.make(self.generator, batch, seed)
        logits = self.discriminator(made, self._classes(batch))
        each = GAMES[self.settings.loss].generator(logits)
        return {'generator_loss': losses.weighted_sum(each, batch['example_weight'])}, {}

    def draw(self, seed: int) -> Mapping[str, tf.Tensor]:
        """Images of the same latent points every time, uint8 [H, W, C]; with classes, a column for each."""
        columns = min(self.classes, 10) or COLUMNS
        latent = tf.random.stateless_normal([ROWS * columns, self.settings.latent], [seed, 0])
        labels = tf.tile(tf.range(columns), [ROWS]) if self.classes else None
        return {'samples': grid(self.shown(latent, labels, training=False).numpy(), columns)}


def make_experiment(
    config: ml_collections.ConfigDict,
    *,
    features: Mapping[str, Feature],
    prepare: Callable[[dict], dict],
    size: int,
    channels: int,
    blocks: int,
    classes: int,
    extract: Callable[[tf.Tensor], tf.Tensor],
) -> Experiment:
    """A GAN of the networks in `ctl.models.dcgan`, by the settings of `make_config`.

    Args:
      features: of a record.
      prepare: makes of them `image`, float32 [B, size, size, channels] in (-1, 1), and with classes `label`, int [B].
      blocks: how often the generator doubles and the discriminator halves the image.
      classes: 0 for none.
      extract: images as in `prepare` -> features that their distances are measured in, float [B, F].

    Raises:
      UserError: for settings that do not go together.
    """
    _check(config)
    players = _make_players(config, size, channels, blocks, classes)
    models = {'generator': players.generator, 'discriminator': players.discriminator}
    averages = []
    if players.shown is not players.generator:
        models['average'] = players.shown
        averages = [Average(players.shown, players.generator, config.model.average)]
    return Experiment(
        features=features,
        prepare=prepare,
        models=models,
        objectives=_make_objectives(config, players),
        averages=averages,
        tallies=[distances.make_tally(extract, lambda batch: players.make(players.shown, batch, None))],
        pictures=lambda: players.draw(config.train.seed),
    )


def _make_players(config: ml_collections.ConfigDict, size: int, channels: int, blocks: int, classes: int) -> _Players:
    """The networks with their first weights; the average, where there is one, begins with those of the generator."""
    settings = config.model
    one_label = tf.zeros([1], tf.int32) if classes else None

    def make_generator(name: str) -> keras.Model:
        made = dcgan.Generator(
            size, channels, settings.generator_width, blocks, settings.generator_norm, classes, name=name
        )
        made(tf.zeros([1, settings.latent]), one_label)  # makes the weights
        return made

    generator = shown = make_generator('generator')
    discriminator = dcgan.Discriminator(
        size, channels, settings.discriminator_width, blocks, settings.spectral_norm, classes, name='discriminator'
    )
    discriminator(tf.zeros([1, size, size, channels]), one_label)
    if settings.average:
        shown = make_generator('average')
        shown.trainable = False
        for mine, its in zip(shown.variables, generator.variables, strict=True):
            mine.assign(its)
    return _Players(generator, discriminator, shown, classes, settings)


def _make_objectives(config: ml_collections.ConfigDict, players: _Players) -> list[Objective]:
    """The discriminator's, which is updated first, and the generator's."""
    watched = {}
    if GAMES[config.model.loss].boundary is not None:
        watched = {'discriminator_accuracy': (ALWAYS_WRONG, ALWAYS_RIGHT)}
    return [
        Objective(
            'discriminator',
            players.discriminator.trainable_variables,
            players.discriminator_losses,
            config.discriminator,
            config.discriminator.updates,
            watched,
        ),
        Objective(
            'generator',
            players.generator.trainable_variables,
            players.generator_losses,
            config.generator,
            config.generator.updates,
        ),
    ]


def _check(config: ml_collections.ConfigDict) -> None:
    settings = config.model
    if settings.loss == 'wasserstein' and settings.penalty == 'none' and not settings.spectral_norm:
        raise UserError(
            "model.loss=wasserstein needs a bound on the discriminator's slope: take model.penalty=wgan_gp, or "
            'model.spectral_norm=true.'
        )
    if settings.generator_norm == 'sync_batch' and config.train.microbatches > 1:
        raise UserError(
            f'model.generator_norm=sync_batch with train.microbatches={config.train.microbatches}: a microbatch does '
            'not know the statistics of the next. Take 1 microbatch, or another norm.'
        )
