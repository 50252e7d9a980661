"""BERT pre-training: masked tokens and next sentences, on TFRecords of the seven classic features.

    python -m ctl.train --experiment=bert_mlm

Without data it trains on the docstrings of the installed Python packages: about 3 minutes on two CPU cores, to a
masked-LM loss of about 5.4 on held-out files, where always predicting the unigram distribution costs 6.0. Your own
records, from google-research/bert, NVIDIA or the Model Garden, with BERT-base:

    python -m ctl.train --experiment=bert_mlm --config.data.train='train*' --config.data.eval='eval*' \
        --config.model.vocab_size=30522 --config.model.max_length=128 --config.model.max_predictions=20 \
        --config.model.layers=12 --config.model.width=768 --config.model.heads=12 \
        --config.optimizer.learning_rate=1e-4 --config.optimizer.warmup_steps=10000 \
        --config.train.global_batch_size=256 --config.train.steps=1000000
"""

from collections.abc import Callable

import ml_collections
import tensorflow as tf

from ctl import losses
from ctl.config import Setting, add_settings, base_config
from ctl.errors import UserError
from ctl.experiment import DefaultData, Experiment, Feature, Objective
from ctl.models.bert import BertPretrainer
from tools import make_bert_records


def get_config() -> ml_collections.ConfigDict:
    config = base_config(
        train=dict(steps=700, global_batch_size=64),
        optimizer=dict(name='adamw', learning_rate=3e-3, warmup_steps=200, weight_decay=0.01, clip_norm=1.0),
        eval=dict(every=350),
        checkpoint=dict(every=350),
        log=dict(every=50),
    )
    add_settings(
        config,
        'model',
        layers=Setting(2, 'encoder blocks', minimum=1),
        width=Setting(128, 'features of a token', minimum=1),
        heads=Setting(2, 'attention heads; must divide the width', minimum=1),
        vocab_size=Setting(8192, 'tokens in the vocabulary', minimum=5),
        max_length=Setting(64, 'tokens in a record', minimum=8),
        max_predictions=Setting(10, 'masked tokens in a record, at most', minimum=1),
        dropout=Setting(0.1, 'part of activations and attention set to 0 in training', minimum=0, below=1),
        next_sentence=Setting(True, 'whether to train the next-sentence head too'),
    )
    return config


def make_default_data(config: ml_collections.ConfigDict, say: Callable[[str], None]) -> DefaultData:
    """Docstrings of installed packages as records that fit `config.model`, made once and kept in the cache."""
    model = config.model
    return make_bert_records.from_docstrings(
        vocab_size=model.vocab_size, max_length=model.max_length, max_predictions=model.max_predictions, say=say
    )


def make_features(model: ml_collections.ConfigDict) -> dict[str, Feature]:
    """The features as google-research/bert names them, and what the Model Garden calls two of them."""

    def list_of(setting: str, dtype: str = 'int32', **kwargs) -> Feature:
        return Feature((model[setting],), dtype, shape_setting=f'model.{setting}', **kwargs)

    vocabulary = dict(
        below=model.vocab_size,
        below_setting='model.vocab_size',
        below_remedy='set it to the size of the vocabulary that the records were made with',
    )
    features = {
        'input_ids': list_of('max_length', also_called=('input_word_ids',), **vocabulary),
        'input_mask': list_of('max_length', below=2),
        'segment_ids': list_of('max_length', also_called=('input_type_ids',), below=2),
        'masked_lm_positions': list_of('max_predictions', below=model.max_length, below_setting='model.max_length'),
        'masked_lm_ids': list_of('max_predictions', **vocabulary),
        'masked_lm_weights': list_of('max_predictions', 'float32'),
    }
    if model.next_sentence:
        features['next_sentence_labels'] = Feature(
            (1,), below=2, missing_remedy='Without it, train masked tokens alone: --config.model.next_sentence=false.'
        )
    return features


def make_experiment(config: ml_collections.ConfigDict) -> Experiment:
    """One model, one objective: the mean over masked tokens plus the mean over sentence pairs."""
    settings = config.model
    if settings.width % settings.heads:
        raise UserError(f'model.heads={settings.heads} does not divide model.width={settings.width}.')
    model = BertPretrainer(
        vocab_size=settings.vocab_size,
        max_length=settings.max_length,
        layers=settings.layers,
        width=settings.width,
        heads=settings.heads,
        dropout=settings.dropout,
        next_sentence=settings.next_sentence,
        name='bert',
    )
    tokens, positions = tf.zeros([1, settings.max_length], tf.int32), tf.zeros([1, settings.max_predictions], tf.int32)
    model(tokens, tokens, tokens, positions)  # makes the weights

    def losses_of(batch, seed):
        masked_BxPxV, next_Bx2 = model(
            batch['input_ids'], batch['input_mask'], batch['segment_ids'], batch['masked_lm_positions'], seed=seed
        )
        example_weight_B = batch['example_weight']
        weights_BxP = batch['masked_lm_weights'] * example_weight_B[:, None]
        terms = {'masked_lm_loss': losses.softmax_cross_entropy(masked_BxPxV, batch['masked_lm_ids'], weights_BxP)}
        metrics = {'masked_lm_accuracy': losses.accuracy(masked_BxPxV, batch['masked_lm_ids'], weights_BxP)}
        if next_Bx2 is not None:
            labels_B = batch['next_sentence_labels'][:, 0]
            terms['next_sentence_loss'] = losses.softmax_cross_entropy(next_Bx2, labels_B, example_weight_B)
            metrics['next_sentence_accuracy'] = losses.accuracy(next_Bx2, labels_B, example_weight_B)
        return terms, metrics

    return Experiment(
        features=make_features(settings),
        models={'bert': model},
        objectives=[Objective('pretraining', model.trainable_variables, losses_of, config.optimizer)],
    )
