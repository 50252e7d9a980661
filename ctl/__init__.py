"""`ctl`: a TensorFlow 2 training loop that can be trusted. The path of a record, from file to weight:

    TFRecord files
      -> data/index      byte offset of every sound record; damage found
      -> data/shards     which logical shard, in which order, where to resume (no TensorFlow)
      -> data/pipeline   dataset_fn(input_context): records -> parsed per-replica batches
      -> step            strategy.run: the updates of one step, one objective's or several
      -> update          forward -> loss sums and weights -> gradients of the global mean
      -> reduce          the only all-reduce of gradients; then the clip
      -> optimizers      apply
      -> runtime/        devices, checkpoints, actions, reporting: around the path, not on it

`train.py`, `session.py` and `loop.py` join these parts in the order they happen: the command line, who takes part, the
run. `experiment.py` is what an experiment supplies, and `gan/` what GANs share.
"""
