"""From TFRecord files to per-replica batches: index -> shards -> pipeline; `inputs` joins the first two."""
