"""Every setting of the loop: its default, its unit, what it may be. `config.py` makes a config of them."""

import dataclasses
import math

Value = bool | int | float | str


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key of the config.

    Attributes:
      default: the value when nothing is said; its type is the type of the key.
      help: what it is, with its unit.
      choices: the only values allowed; empty for any.
      minimum: the smallest value allowed, for numbers.
      below: the first value that is too large, for numbers.
    """

    default: Value
    help: str
    choices: tuple[Value, ...] = ()
    minimum: float = -math.inf
    below: float = math.inf


BASE = {
    'train': {
        'steps': Setting(1000, 'weight updates in the whole run', minimum=1),
        'global_batch_size': Setting(
            32, 'examples in one weight update, over all replicas together', minimum=1, below=2**24
        ),
        'microbatches': Setting(
            1, "slices of a replica's batch, summed before the all-reduce to save memory", minimum=1
        ),
        'steps_per_loop': Setting(
            100, 'most steps in one TensorFlow loop; logs, evaluations and saves cut it', minimum=1
        ),
        'seed': Setting(0, 'seed of initial weights, record order and dropout', minimum=0, below=2**31),
        'init_checkpoint': Setting(
            '', "another run's checkpoint, whose weights alone a new run starts with, at step 0; '' is none"
        ),
        'on_nonfinite': Setting(
            'stop',
            'a step whose loss or gradient is not finite stops the run, or leaves weights and slots as they were',
            choices=('stop', 'skip'),
        ),
        'max_nonfinite': Setting(10, 'such steps in a row that may be skipped', minimum=0),
        'update_order': Setting(
            'sequential',
            'with several objectives: each update sees the one before, or those of a round start from the same weights',
            choices=('sequential', 'joint'),
        ),
        'fresh_batches': Setting(
            False, 'whether each update of a step has a global batch of its own, or all share one'
        ),
        'watch_steps': Setting(
            200,
            'steps that a watched metric may stay at 0 or 1 before it is said what that means; 0 is never',
            minimum=0,
        ),
        'precision': Setting(
            'float32',
            'arithmetic of the layers; weights are float32. tensorfloat32: of matrix products on GPUs that have it',
            choices=('float32', 'tensorfloat32', 'bfloat16'),
        ),
        'deterministic': Setting(
            False, 'the same bits from run to run also on GPUs, where sums are then slower; CPUs need it not'
        ),
    },
    'data': {
        'train': Setting(
            '', "glob of the training TFRecords; commas separate several; '' is the experiment's own data"
        ),
        'eval': Setting('', "glob of the evaluation TFRecords; '' is the experiment's own data"),
        'logical_shards': Setting(
            0, 'shares of the data, each with its own order; 0 chooses by files and batch', minimum=0
        ),
        'shard_by': Setting(
            'auto', 'whether a share is whole files or a run of records', choices=('auto', 'file', 'record')
        ),
        'digest': Setting('', 'of the names and records of the training files; found at the first start'),
        'eval_digest': Setting('', 'of the names and records of the evaluation files; found at every start'),
        'block_records': Setting(128, 'records read in one sequential piece', minimum=1),
        'window_records': Setting(
            1024, 'records shuffled together; blocks come to a window from the whole share', minimum=1
        ),
        'window_mebibytes': Setting(
            1024, 'most memory of all windows together; large records make windows smaller', minimum=1
        ),
        'on_bad_record': Setting(
            'fail',
            'a damaged or wrong record stops the run, or is left out or given weight 0',
            choices=('fail', 'skip'),
        ),
        'max_bad_records': Setting(100, 'bad records, each counted once, that a worker may skip', minimum=0),
    },
    'eval': {
        'every': Setting(500, 'steps between evaluations; one always comes at the end; 0 is only that one', minimum=0),
        'at_start': Setting(False, 'whether to evaluate before the first step too'),
        'steps': Setting(
            -1, 'global batches in one evaluation, a sample of the records; -1 is every record once', minimum=-1
        ),
    },
    'checkpoint': {
        'every': Setting(500, 'steps between checkpoints; one always comes at the end', minimum=1),
        'keep': Setting(3, 'newest checkpoints kept', minimum=1),
        'best_metric': Setting('', "a number of the evaluation; its best is kept in checkpoints/best; '' is none"),
        'best_mode': Setting('min', 'whether the least or the largest is the best', choices=('min', 'max')),
        'async_save': Setting(False, 'whether checkpoints are written while training goes on, from a copy in memory'),
    },
    'devices': {
        'strategy': Setting(
            'auto',
            'auto is one for 1 replica, mirrored for more; multi_worker is as TF_CONFIG or Slurm says',
            choices=('auto', 'one', 'mirrored', 'multi_worker'),
        ),
        'kind': Setting(
            'auto',
            'what a replica is on; auto is gpu where there is one, else cpu, which TensorFlow divides as needed',
            choices=('auto', 'gpu', 'cpu'),
        ),
        'stall_seconds': Setting(
            600, 'seconds that steps may take beyond what they took before, until the run ends; 0 is off', minimum=0
        ),
        'start_timeout': Setting(300, 'seconds that workers wait for each other', minimum=1),
        'replicas': Setting(
            0,
            'model copies on this machine; 0 is every GPU, or 1 CPU; on CPUs, N makes N virtual devices',
            minimum=0,
        ),
        'all_reduce': Setting('auto', 'how gradients are summed', choices=('auto', 'nccl', 'hierarchical', 'ring')),
        'bytes_per_pack': Setting(
            1 << 25, 'gradients that nccl or ring sums at once; 0 is all, when the last is there', minimum=0
        ),
        'input_pipelines': Setting(
            'per_worker', 'one dataset_fn call a worker, or one a replica', choices=('per_worker', 'per_replica')
        ),
    },
    'log': {
        'every': Setting(10, 'steps between lines of metrics.jsonl and of progress', minimum=1),
    },
}

# The settings of one optimizer, a section for each objective that has its own.
OPTIMIZER = {
    'name': Setting('adamw', 'Keras optimizer', choices=('adamw', 'lamb', 'sgd', 'adam')),
    'learning_rate': Setting(1e-3, 'peak of the schedule', minimum=0),
    'warmup_steps': Setting(0, 'steps of linear warm-up', minimum=0),
    'schedule': Setting('linear', 'decay from the peak to 0 at train.steps', choices=('linear', 'cosine', 'constant')),
    'beta_1': Setting(
        0.9, 'decay of the mean gradient in adamw, adam and lamb; the momentum of sgd', minimum=0, below=1
    ),
    'beta_2': Setting(0.999, 'decay of the mean squared gradient in adamw, adam and lamb', minimum=0, below=1),
    'weight_decay': Setting(
        0.01, 'matrices shrink by this x learning rate a step, in lamb x its trust ratio too; 0 is off', minimum=0
    ),
    'clip_norm': Setting(1.0, 'largest global norm of the reduced gradient; 0 is off', minimum=0),
}
