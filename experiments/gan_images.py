"""A GAN of your own square images, 8 to 128 pixels high, with classes or without.

    python -m tools.make_image_records FOLDER --output=records --size=64
    python -m ctl.train --experiment=gan_images --config.data.train='records/train*' --config.data.eval='records/eval*'

Distances to real images are measured over the features of Keras's InceptionV3 where `model.inception_weights` names a
file with its weights, without the top; else over the images shrunk to 8 by 8 pixels, which tells colours and layout
only. Either way they compare with each other, and not with published figures (`load_inception` says why).
"""

from collections.abc import Callable

import keras
import ml_collections
import tensorflow as tf

from ctl.commands import command
from ctl.config import Setting
from ctl.errors import UserError
from ctl.experiment import DefaultData, Experiment, Feature
from ctl.gan import players
from ctl.gan.images import BASE, CHANNELS, SIZES

MAKER = command('tools.make_image_records', 'FOLDER', '--output=records')


def get_config() -> ml_collections.ConfigDict:
    adam = dict(
        name='adam', learning_rate=2e-4, beta_1=0.0, beta_2=0.99, weight_decay=0.0, clip_norm=0.0, schedule='constant'
    )
    return players.make_config(
        train=dict(steps=100_000, global_batch_size=64),
        eval=dict(every=5000),
        checkpoint=dict(every=1000),
        log=dict(every=100),
        generator=adam,
        discriminator=adam,
        model=dict(
            penalty='r1',
            size=Setting(64, 'height and width of the images, pixels', choices=SIZES),
            channels=Setting(3, 'of the images', choices=CHANNELS),
            classes=Setting(0, 'of the images; 0 is to take no notice of them', minimum=0),
            generator_width=Setting(64, 'features of the generator at full size', minimum=1),
            discriminator_width=Setting(64, 'features of the discriminator at half of the size', minimum=1),
            inception_weights=Setting('', "file with InceptionV3's weights; '' measures distances over small images"),
        ),
    )


def make_default_data(config: ml_collections.ConfigDict, say: Callable[[str], None]) -> DefaultData:
    raise UserError(
        'data.train is not set: gan_images trains on your images. Make records of them, which also prints the command: '
        f'{MAKER}'
    )


def make_experiment(config: ml_collections.ConfigDict) -> Experiment:
    settings = config.model
    size, channels = settings.size, settings.channels
    features = {
        'image': Feature(
            (size, size, channels),
            'image',
            also_called=('image/encoded',),
            shape_setting='model.size',
            shape_choices=SIZES,
            shape_remedy=f'gan_images trains on squares of {", ".join(map(str, SIZES))} pixels, all of one size. Make '
            f'such records of a folder of images: {MAKER}',
        )
    }
    if settings.classes:
        features['label'] = Feature(
            (),
            also_called=('image/class/label',),
            below=settings.classes,
            below_setting='model.classes',
            below_remedy='set it to the number of classes',
            missing_remedy='Without classes: --config.model.classes=0.',
        )

    def prepare(batch: dict) -> dict:
        return {**batch, 'image': tf.cast(batch['image'], tf.float32) / 127.5 - 1}

    return players.make_experiment(
        config,
        features=features,
        prepare=prepare,
        size=size,
        channels=channels,
        blocks=(size // BASE).bit_length() - 1,
        classes=settings.classes,
        extract=load_inception(settings.inception_weights) if settings.inception_weights else shrink,
    )


def shrink(images: tf.Tensor) -> tf.Tensor:
    """Images [B, S, S, C] -> their 8 x 8 means, [B, 64 C]."""
    times = images.shape[1] // 8
    return tf.reshape(tf.nn.avg_pool2d(images, times, times, 'VALID'), [-1, 64 * images.shape[-1]])


def load_inception(path: str) -> Callable[[tf.Tensor], tf.Tensor]:
    """Images in (-1, 1) -> the 2,048 features from which Keras's InceptionV3 reads its classes.

    Images are enlarged to 299 x 299 pixels, bilinearly; grey ones are given three channels. The published distances are
    those of Heusel et al. 2017, over another Inception with other weights: figures over this one do not compare with
    them, only with each other.

    Raises:
      UserError: when the file does not hold the weights.
    """
    try:
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy('float32')  # distances between features of 8 bits would compare with no others
        try:
            model = keras.applications.InceptionV3(include_top=False, weights=path, pooling='avg')
        finally:
            keras.config.set_dtype_policy(policy)
    except Exception as error:  # whatever Keras, or what reads the file, has against it
        raise UserError(f'model.inception_weights={path}: {" ".join(str(error).split())[:200]}') from None

    def extract(images: tf.Tensor) -> tf.Tensor:
        images = tf.image.resize(images, [299, 299])
        return model(tf.repeat(images, 3 // images.shape[-1], axis=-1), training=False)

    return extract
