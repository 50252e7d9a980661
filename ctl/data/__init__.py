"""From TFRecord files to per-replica batches: index -> shards -> pipeline."""
